// Elements; strings inside are text, never markup.

export const byId = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...inside) {
  return fill(document.createElement(tag), attributes, inside);
}

export function draw(tag, attributes = {}, ...inside) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, inside);
}

function fill(element, attributes, inside) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value != null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...inside.filter((one) => one != null));
  return element;
}

/** Set only what changes: a page that is looked at all day should not make the browser lay out for nothing. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function mark(element, name, value) {
  if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

/** How wide it is, without making the browser lay out to say so, unless it was hidden. When that changes the window hears of it. */
export function widthOf(element) {
  let width = element.clientWidth;
  new ResizeObserver(([{ contentRect }]) => {
    if (width === (width = Math.round(contentRect.width))) return;
    dispatchEvent(new Event("widthchange"));
  }).observe(element);
  return () => width ||= element.clientWidth;
}

/** Parts of a whole, side by side: [[kind, share], ...]. */
export function parts(shares) {
  return shares.filter(([, share]) => share > 0).map(([kind, share]) => {
    const part = make("div", { class: "part", "data-kind": kind });
    part.style.flex = `${share} 0 0`;
    return part;
  });
}

const probe = make("span", { hidden: true });

/** A colour of base.css as the theme has it, for what draws on a canvas. */
export function colour(name) {
  if (!probe.isConnected) document.body.append(probe);
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}
