"use strict";
// Before anything is painted. "auto" is what the system says.
(() => {
  const order = ["auto", "light", "dark"];
  const root = document.documentElement;
  const known = (theme) => (order.includes(theme) ? theme : "auto");
  let kept = null;
  try { kept = localStorage.getItem("trouper-theme"); } catch { /* a browser that keeps nothing */ }
  root.dataset.theme = known(kept);
  const tell = () => window.dispatchEvent(new Event("themechange"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", tell);
  addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const show = () => { button.textContent = `Theme: ${root.dataset.theme}`; };
    button.addEventListener("click", () => {
      root.dataset.theme = order[(order.indexOf(root.dataset.theme) + 1) % order.length];
      try { localStorage.setItem("trouper-theme", root.dataset.theme); } catch { /* as above */ }
      show();
      tell();
    });
    show();
  });
})();
