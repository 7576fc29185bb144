// Markdown's blocks: text becomes a list of {tag, attributes, inside}, and {tag: "pre", language, text} for code.

import { parseInline } from "./markdown_inline.js";

const FENCE = /^( {0,3})(`{3,}(?!.*`)|~{3,})\s*(\S*)/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*?))??(?:[ \t]+#+)?[ \t]*$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const UNDERLINE = /^ {0,3}(=+|-+)[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const MARKER = /^( {0,3}(?:([-+*])|(\d{1,9})([.)])))( +|\t|$)/;
const DELIMITERS = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
/** What is deeper is a paragraph. */
const DEEPEST = 20;

/** Each block with its source, by which a longer text's blocks are known again. */
export function parseBlocks(text) {
  const lines = text.replaceAll("\r\n", "\n").split("\n");
  return parse(lines, 0).map((block) => ({ ...block, source: lines.slice(block.from, block.to).join("\n") }));
}

const isBlank = (line) => !line.trim();
/** In columns: a tab goes to the next fourth one. */
function indentOf(line) {
  let columns = 0;
  for (const one of line) {
    if (one === "\t") columns += 4 - (columns % 4);
    else if (one === " ") columns += 1;
    else return columns;
  }
  return columns;
}

/** Without `columns` of indent. Tabs behind them stay: code is copied as it was written. */
function dedent(line, columns) {
  let at = 0, column = 0;
  while (column < columns && (line[at] === " " || line[at] === "\t")) {
    column += line[at] === "\t" ? 4 - (column % 4) : 1;
    at += 1;
  }
  return " ".repeat(Math.max(0, column - columns)) + line.slice(at);
}

function parse(lines, depth) {
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    if (isBlank(lines[at])) { at += 1; continue; }
    const block = readBlock(lines, at, depth);
    blocks.push({ ...block, from: at });
    at = block.to;
  }
  return blocks;
}

function readBlock(lines, at, depth) {
  const simple = readIndented(lines, at) ?? readFence(lines, at) ?? readHeading(lines, at) ?? readRule(lines, at);
  if (simple) return simple;
  const nested = depth < DEEPEST ? readQuote(lines, at, depth) ?? readList(lines, at, depth) : null;
  return nested ?? readTable(lines, at) ?? readParagraph(lines, at);
}

function readIndented(lines, at) {
  if (indentOf(lines[at]) < 4) return null;
  let to = at;
  while (to < lines.length && (isBlank(lines[to]) || indentOf(lines[to]) >= 4)) to += 1;
  while (isBlank(lines[to - 1])) to -= 1;
  return { tag: "pre", language: "", text: lines.slice(at, to).map((line) => dedent(line, 4) + "\n").join(""), to };
}

/** Code that has not ended goes on to the end: so it is shown while it comes. */
function readFence(lines, at) {
  const open = FENCE.exec(lines[at]);
  if (!open) return null;
  const [, indent, ticks, language] = open;
  const isEnd = (line) => indentOf(line) < 4 && line.trim().length >= ticks.length && !line.trim().replaceAll(ticks[0], "");
  let to = at + 1;
  while (to < lines.length && !isEnd(lines[to])) to += 1;
  const code = lines.slice(at + 1, to).map((line) => dedent(line, indent.length));
  // The last line of a text that has not ended has no line's end yet.
  const isOpen = to === lines.length;
  if (isOpen && code.at(-1) === "") code.pop();
  return { tag: "pre", language, text: code.map((line) => line + "\n").join(""), to: isOpen ? to : to + 1 };
}

function readHeading(lines, at) {
  const heading = HEADING.exec(lines[at]);
  if (!heading) return null;
  return { tag: `h${heading[1].length}`, inside: parseInline((heading[2] ?? "").replace(/^#+$/, "").trim()), to: at + 1 };
}

function readRule(lines, at) {
  return RULE.test(lines[at]) ? { tag: "hr", inside: [], to: at + 1 } : null;
}

function readQuote(lines, at, depth) {
  if (!QUOTE.test(lines[at])) return null;
  const inner = [];
  let to = at;
  for (; to < lines.length && !isBlank(lines[to]); to += 1) {
    if (QUOTE.test(lines[to])) inner.push(lines[to].replace(QUOTE, ""));
    else if (isBlank(inner.at(-1)) || !continuesParagraph(lines, to) || !endsInParagraph(inner, depth)) break;
    else inner.push(lines[to].trimStart());
  }
  return { tag: "blockquote", inside: parse(inner, depth + 1), to };
}

/** Whether a line that is not indented may belong to the paragraph above, wherever that is. */
const continuesParagraph = (lines, at) => !interrupts(lines, at) && !UNDERLINE.test(lines[at]);

/** The last lines tell, and a long quote is not read again for each of its lines. */
function endsInParagraph(lines, depth) {
  let last = parse(lines.slice(-50), depth + 1).at(-1);
  while (last && !["p", "pre"].includes(last.tag) && last.inside?.length) last = last.inside.at(-1).end ?? last.inside.at(-1);
  return last?.tag === "p";
}

function markerOf(line) {
  const found = MARKER.exec(line);
  if (!found || RULE.test(line)) return null;
  const [all, mark, bullet, number, behind, blanks] = found;
  const isEmpty = all.length === line.length;
  // Code in an item begins five blanks behind the marker.
  const width = mark.length + (isEmpty || blanks.length > 4 ? 1 : blanks.length);
  return { kind: bullet ?? behind, isBullet: Boolean(bullet), start: Number(number), width, isEmpty };
}

function readList(lines, at, depth) {
  const first = markerOf(lines[at]);
  if (!first) return null;
  const items = [];
  let to = at, isLoose = false, hasBlanks = false;
  for (let mark = first; mark?.kind === first.kind; mark = to < lines.length ? markerOf(lines[to]) : null) {
    isLoose ||= hasBlanks;
    const item = readItem(lines, to, mark, depth);
    hasBlanks = item.hasBlanks;
    to = item.to;
    const blocks = parse(item.lines, depth + 1);
    isLoose ||= blocks.some((block, place) => place > 0 && block.from > blocks[place - 1].to);
    items.push(blocks);
    while (to < lines.length && hasBlanks && isBlank(lines[to])) to += 1;
  }
  while (isBlank(lines[to - 1])) to -= 1;
  const attributes = first.isBullet || first.start === 1 ? {} : { start: first.start };
  const inside = items.map((blocks) => ({ tag: "li", inside: isLoose ? blocks : blocks.flatMap(unwrapped), end: blocks.at(-1) }));
  return { tag: first.isBullet ? "ul" : "ol", attributes, inside, to };
}

const unwrapped = (block) => (block.tag === "p" ? block.inside : [block]);

/** The lines of one item without their indent, where they end, and whether blank ones follow. */
function readItem(lines, at, { width, isEmpty }, depth) {
  const own = [lines[at].slice(width)];
  let to = at + 1, isLazy = false;
  for (; to < lines.length; to += 1) {
    const line = lines[to];
    if (isBlank(line)) {
      if (isEmpty && to === at + 1) break;
      own.push("");
      isLazy = false;
    } else if (indentOf(line) >= width) {
      own.push(dedent(line, width));
      isLazy = false;
    } else if (!isBlank(own.at(-1)) && !markerOf(line) && continuesParagraph(lines, to) && (isLazy || endsInParagraph(own, depth))) {
      own.push(line.trimStart());
      isLazy = true;
    } else break;
  }
  const hasBlanks = own.length > 1 && isBlank(own.at(-1)) || (to < lines.length && isBlank(lines[to]));
  while (own.length > 1 && isBlank(own.at(-1))) own.pop();
  return { lines: own, to, hasBlanks };
}

function cellsOf(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function readTable(lines, at) {
  const delimiters = lines[at + 1] ?? "";
  if (!lines[at].includes("|") && !delimiters.includes("|") || !DELIMITERS.test(delimiters) || !/[|:]/.test(delimiters)) return null;
  const head = cellsOf(lines[at]), aligns = cellsOf(delimiters).map(alignOf);
  if (head.length !== aligns.length) return null;
  const row = (tag, cells) => ({
    tag: "tr",
    inside: aligns.map((align, place) => ({ tag, attributes: { "data-align": align }, inside: parseInline(cells[place] ?? "") })),
  });
  let to = at + 2;
  while (to < lines.length && !isBlank(lines[to]) && indentOf(lines[to]) < 4 && !interrupts(lines, to, true)) to += 1;
  const rows = lines.slice(at + 2, to).map((line) => row("td", cellsOf(line)));
  const inside = [{ tag: "thead", inside: [row("th", head)] }];
  if (rows.length) inside.push({ tag: "tbody", inside: rows });
  return { tag: "table", inside, to };
}

function alignOf(cell) {
  if (cell.endsWith(":")) return cell.startsWith(":") ? "center" : "right";
  return cell.startsWith(":") ? "left" : null;
}

function readParagraph(lines, at) {
  let to = at + 1;
  for (; to < lines.length && !isBlank(lines[to]); to += 1) {
    const underline = UNDERLINE.exec(lines[to]);
    if (underline) {
      const tag = underline[1].startsWith("=") ? "h1" : "h2";
      return { tag, inside: parseInline(textOf(lines.slice(at, to))), to: to + 1 };
    }
    if (interrupts(lines, to)) break;
  }
  return { tag: "p", inside: parseInline(textOf(lines.slice(at, to))), to };
}

const textOf = (lines) => lines.map((line) => line.trimStart()).join("\n").trimEnd();

/** Whether another block begins here, where a paragraph or a table would go on. */
function interrupts(lines, at, isTable = false) {
  const line = lines[at];
  if (indentOf(line) >= 4) return false;
  const mark = markerOf(line);
  const isList = mark && !mark.isEmpty && (mark.isBullet || mark.start === 1);
  return Boolean(isList || FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || (!isTable && readTable(lines, at)));
}
