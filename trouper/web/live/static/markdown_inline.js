// Markdown inside a block: text becomes a list of strings and {tag, attributes, inside}.
//
// The dialect is the terminal chat's: CommonMark without HTML, with strikethrough, and a line's end is one.
// Links by reference are left out: a block would depend on text that has not come yet.

const ESCAPED = /\\([!-/:-@[-`{-~])/y;
const AUTOLINK = /<((?:https?|mailto):[^\s<>]*)>/y;
const TARGET = /\(\s*(?:<([^<>\n]*)>|((?:[^\s()\\]|\\.|\((?:[^\s()\\]|\\.)*\))*))(?:\s+(?:"(?:[^"\\]|\\[^])*"|'(?:[^'\\]|\\[^])*'))?\s*\)/y;
const ENTITY = /&(?:#(\d{1,7})|#[xX]([\da-fA-F]{1,6})|(amp|lt|gt|quot|apos|nbsp));/y;
const NAMED = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
const PLAIN = /[^\\`<&[\]!*_~\n]+/y;
const SPACE = /^\s?$/u, PUNCTUATION = /[\p{P}\p{S}]/u;
/** Emphasis beyond it stays as it is written: each one may be inside the one before, and depth costs stack. */
const MOST_MARKS = 1000;

/** The only addresses that become links; with others it is text, as it was written. */
const isSafe = (url) => /^(?:https?|mailto):/i.test(url);

export function parseInline(text) {
  const items = [], brackets = [];
  for (let at = 0; at < text.length;) at = readOne(text, at, items, brackets);
  return emphasize(items);
}

/** Reads what begins at `at` into `items`, and returns where it ends. */
function readOne(text, at, items, brackets) {
  const match = (pattern) => { pattern.lastIndex = at; return pattern.exec(text); };
  const plain = match(PLAIN);
  if (plain) return items.push(plain[0]), at + plain[0].length;
  switch (text[at]) {
    case "\n": return readBreak(text, at, items);
    case "`": return readCode(text, at, items);
    case "[": return openBracket("[", at, items, brackets);
    case "!": return text[at + 1] === "[" ? openBracket("![", at, items, brackets) : (items.push("!"), at + 1);
    case "]": return closeBracket(text, at, items, brackets);
    case "*": case "_": case "~": return readMarks(text, at, items);
  }
  const escaped = match(ESCAPED), entity = match(ENTITY), link = match(AUTOLINK);
  if (escaped) items.push(escaped[1]);
  else if (entity) items.push(characterOf(entity));
  else if (link) items.push({ tag: "a", attributes: { href: link[1] }, inside: [link[1]] });
  else if (text[at] === "\\" && text[at + 1] === "\n") return readBreak(text, at + 1, items);
  else items.push(text[at]);
  return at + (escaped ?? entity ?? link ?? " ")[0].length;
}

function characterOf([, decimal, hexadecimal, name]) {
  if (name) return NAMED[name];
  const code = decimal ? Number(decimal) : parseInt(hexadecimal, 16);
  const isCharacter = code > 0 && code <= 0x10ffff && (code < 0xd800 || code > 0xdfff);
  return isCharacter ? String.fromCodePoint(code) : "\ufffd";
}

/** Blanks around a line's end are no text. */
function readBreak(text, at, items) {
  if (typeof items.at(-1) === "string") items.push(items.pop().trimEnd());
  items.push({ tag: "br", inside: [] });
  let next = at + 1;
  while (text[next] === " ") next += 1;
  return next;
}

function readCode(text, at, items) {
  const ticks = /^`+/.exec(text.slice(at))[0], from = at + ticks.length;
  for (const run of text.slice(from).matchAll(/`+/g)) {
    if (run[0].length !== ticks.length) continue;
    const code = text.slice(from, from + run.index).replaceAll("\n", " ");
    const isPadded = code.startsWith(" ") && code.endsWith(" ") && code.trim();
    items.push({ tag: "code", inside: [isPadded ? code.slice(1, -1) : code] });
    return from + run.index + ticks.length;
  }
  items.push(ticks);
  return from;
}

function openBracket(mark, at, items, brackets) {
  brackets.push({ place: items.length, isImage: mark === "![" });
  items.push(mark);
  return at + mark.length;
}

/** A link, or only a bracket. A picture becomes a link, too: the page loads nothing that a model names. */
function closeBracket(text, at, items, brackets) {
  const open = brackets.pop();
  TARGET.lastIndex = at + 1;
  const target = open && !open.isOff && TARGET.exec(text);
  const href = target && (target[1] ?? target[2]).replace(/\\([!-/:-@[-`{-~])/g, "$1");
  if (!target || !isSafe(href)) return items.push("]"), at + 1;
  const inside = emphasize(items.splice(open.place).slice(1));
  items.push({ tag: "a", attributes: { href }, inside: inside.length ? inside : [href] });
  // There is no link in a link.
  if (!open.isImage) for (const one of brackets) one.isOff ||= !one.isImage;
  return at + 1 + target[0].length;
}

/** A run of *, _ or ~, which may open emphasis, close it, or be text: by what is before and behind it. */
function readMarks(text, at, items) {
  const sign = text[at];
  let end = at;
  while (text[end] === sign) end += 1;
  const before = [...text.slice(Math.max(0, at - 2), at)].at(-1) ?? "", after = [...text.slice(end, end + 2)][0] ?? "";
  const left = !SPACE.test(after) && (!PUNCTUATION.test(after) || SPACE.test(before) || PUNCTUATION.test(before));
  const right = !SPACE.test(before) && (!PUNCTUATION.test(before) || SPACE.test(after) || PUNCTUATION.test(after));
  const isWord = sign === "_"; // snake_case is no emphasis.
  items.push({
    sign, count: end - at, length: end - at,
    opens: left && (!isWord || !right || PUNCTUATION.test(before)),
    closes: right && (!isWord || !left || PUNCTUATION.test(after)),
  });
  return end;
}

/** Pairs of marks become elements, as CommonMark's algorithm has it; marks that are left are text. */
function emphasize(items) {
  const bottoms = new Map(); // By kind of closing mark: below it nothing opens one.
  let marks = 0;
  for (let at = 0; at < items.length;) {
    const closer = items[at];
    if (!closer.closes || marks > MOST_MARKS) { at += 1; continue; }
    const kind = `${closer.sign}${closer.opens}${closer.length % 3}`, bottom = bottoms.get(kind) ?? 0;
    let opener = at - 1;
    while (opener >= bottom && !pairs(items[opener], closer)) opener -= 1;
    if (opener < bottom) {
      bottoms.set(kind, at);
      at += 1;
      continue;
    }
    marks += 1;
    at = enclose(items, opener, at);
    for (const [one, place] of bottoms) bottoms.set(one, Math.min(place, opener));
  }
  return joined(items);
}

function pairs(opener, closer) {
  if (!opener.opens || opener.sign !== closer.sign) return false;
  if (closer.sign === "~") return opener.count >= 2 && closer.count >= 2;
  const isOdd = (opener.closes || closer.opens) && (opener.length + closer.length) % 3 === 0;
  return !isOdd || (opener.length % 3 === 0 && closer.length % 3 === 0);
}

/** Returns where to go on. */
function enclose(items, opener, closer) {
  const first = items[opener], last = items[closer];
  const used = first.count >= 2 && last.count >= 2 ? 2 : 1;
  const tag = first.sign === "~" ? "s" : used === 2 ? "strong" : "em";
  const inside = joined(items.slice(opener + 1, closer));
  first.count -= used;
  last.count -= used;
  const kept = [...(first.count ? [first] : []), { tag, inside }, ...(last.count ? [last] : [])];
  items.splice(opener, closer - opener + 1, ...kept);
  return opener + (first.count ? 2 : 1);
}

/** Marks as text, and texts side by side as one. */
function joined(items) {
  const found = [];
  for (const item of items) {
    const one = item.sign ? item.sign.repeat(item.count) : item;
    if (typeof one === "string" && typeof found.at(-1) === "string") found.push(found.pop() + one);
    else found.push(one);
  }
  return found;
}
