// Rates and gaps of the last two minutes, drawn by uPlot.

import { colour, make, say } from "./dom.js";
import { short } from "./format.js";

const HEIGHT = 124;
const SPAN_S = 120;
const PLOTS = [
  { title: "Answers, tok/s", series: [["generated", "answers", "decode"]] },
  { title: "Prompts, tok/s", series: [["computed", "computed", "prefill"], ["cached", "from cache", "cached"]] },
  { title: "Token gap, ms", series: [["longest", "longest", "prefill"], ["median", "median", "decode"]] },
];

export class Plots {
  #place;
  #shown = [];
  #sync = window.uPlot.sync("rates");

  constructor(place) {
    this.#place = place;
    this.rebuild();
    new ResizeObserver(() => this.#resize()).observe(place);
  }

  /** Colours are read once, so a new theme needs new plots. */
  rebuild() {
    for (const { plot } of this.#shown) plot.destroy();
    this.#shown = PLOTS.map((told) => this.#build(told));
    this.#place.replaceChildren(...this.#shown.map(({ figure }) => figure));
    this.#resize();
  }

  #build({ title, series }) {
    const value = make("b"), now = make("span", { class: "hidden" });
    const keys = series.length > 1 ? series.map(([, name, kind]) => make("span", { class: "key", "data-kind": kind }, name)) : [];
    const place = make("div", { "aria-hidden": "true" });
    const figure = make("figure", {}, make("figcaption", {}, make("span", {}, title, now), make("span", {}, value, ...keys)), place);
    const plot = new window.uPlot(options(series, this.#sync.key), [[], ...series.map(() => [])], place);
    return { figure, plot, value, now, series };
  }

  /** `rates` are the latest ones, if these are of now. */
  draw({ columns }, rates, now) {
    for (const { plot, value, now: told, series } of this.#shown) {
      say(told, `: now ${series.map(([name, called]) => `${called} ${short(rates.last(name))}`).join(", ")}`);
      plot.setData([columns.at, ...series.map(([name]) => columns[name])], false);
      const highest = Math.max(1, ...series.flatMap(([name]) => columns[name].filter((one) => one != null)));
      plot.batch(() => {
        plot.setScale("x", { min: now - SPAN_S, max: now });
        plot.setScale("y", { min: 0, max: highest * 1.12 });
      });
      const place = plot.cursor.idx;
      say(value, place == null ? "" : series.map(([name]) => short(columns[name][place])).join(" · "));
    }
  }

  #resize() {
    for (const { figure, plot } of this.#shown) {
      const width = figure.clientWidth;
      if (width && width !== plot.width) plot.setSize({ width, height: HEIGHT });
    }
  }
}

function options(series, key) {
  const [soft, line] = [colour("soft"), colour("line")];
  const font = "11px system-ui, sans-serif";
  const grid = { stroke: line, width: 1 };
  return {
    width: 300, height: HEIGHT, padding: [8, 14, 0, 0], legend: { show: false },
    cursor: { sync: { key }, drag: { x: false, y: false }, points: { size: 5 } },
    scales: { x: { time: false, auto: false }, y: { auto: false } },
    axes: [
      { stroke: soft, font, grid, ticks: { show: false }, size: 24, gap: 7,
        splits: (_, __, min, max) => [min, min + (max - min) / 2, max],
        values: (_, splits) => splits.map((split) => ago(splits.at(-1) - split)) },
      { stroke: soft, font, grid, ticks: { show: false }, size: 38, gap: 4, space: 26,
        values: (_, splits) => splits.map(thousands) },
    ],
    series: [{}, ...series.map(([, , kind], place) => ({
      stroke: colour(kind), width: 1.6, points: { show: false }, spanGaps: false,
      fill: place === series.length - 1 ? colour(kind).replace(/^rgb\((.*)\)$/, "rgba($1, .12)") : undefined,
    }))],
  };
}

const ago = (s) => (s < 1 ? "now" : s < 61 ? "-1 min" : "-2 min");
const thousands = (value) => (value >= 10000 ? `${Math.round(value / 1000)}k` : String(value));
