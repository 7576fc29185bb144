// Buttons that are a drawing; their name is read out, and shown where the mouse rests.

import { draw, make } from "./dom.js";

const PATHS = {
  copy: "M6 6h7v8H6z M10 6V2H3v8h3",
  edit: "M3 13l1-3 7-7 2 2-7 7z",
  retry: "M13 8a5 5 0 1 1-1.5-3.6 M13 2v3h-3",
  remove: "M4 4l8 8 M12 4l-8 8",
};

export function iconButton(icon, label, act) {
  const drawing = draw("svg", { viewBox: "0 0 16 16", width: 14, height: 14, "aria-hidden": "true", class: "icon" },
    draw("path", { d: PATHS[icon] }));
  const button = make("button", { type: "button", class: "plain icon-button", "aria-label": label, title: label }, drawing);
  button.addEventListener("click", act);
  return button;
}
