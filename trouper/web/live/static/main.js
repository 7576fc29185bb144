// What is where, and who is told of a snapshot.

import { describeServer } from "./about.js";
import { Age } from "./age.js";
import { Chat } from "./chat.js";
import { byId, make, mark, say } from "./dom.js";
import { Feed } from "./feed.js";
import { Figures } from "./figures.js";
import { clock, count, modelName, plural } from "./format.js";
import { History } from "./history.js";
import * as key from "./key.js";
import { Kv } from "./kv.js";
import { Lanes } from "./lanes.js";
import { Models } from "./models.js";
import { describeNow } from "./now.js";
import { Plots } from "./plots.js";
import { Refused } from "./problem.js";
import { Requests } from "./requests.js";
import { Rows } from "./rows.js";
import { Tiers } from "./tiers.js";
import { Timeline } from "./timeline.js";
import { Views } from "./views.js";
import { Actors } from "./actors.js";

const WORDS = { ok: "Running", draining: "Shutting down", unloading: "Unloading", restarting: "Restarting", stalled: "Stalled", stuck: "Device stuck", failed: "Failed" };

/** How often what changes slowly is painted anew: less at a time is less for a browser that paints without a GPU. */
const SLOWLY_MS = 1900;

/** Of a server that is away. */
const NO_RATES = { last: () => null, steps: null };

byId("main").hidden = false; // Sizes are needed from here on.
const figures = new Figures(byId("figures")), timeline = new Timeline(byId("timeline")), rows = new Rows(byId("rows"));
const kv = new Kv(byId("kv"), byId("kv-note"));
const plots = new Plots(byId("plots")), actors = new Actors(byId("actors")), chat = new Chat();
const tiers = new Tiers(byId("tiers"), byId("tiers-note")), requests = new Requests(byId("requests"), byId("no-requests"));
const models = new Models(byId("models"), () => lock(key.WRONG));
const known = new Map(); // By model: {history, lanes}.
const select = byId("model");
let server = null, chosen = null, latest = null, ended = [], frame = 0, slowlyAt = -Infinity;
let away = false; // The server, or the way to it.
let useAlone = null; // Of a key that has the chat alone: (model) => it is used.
const views = new Views(() => paint(true));

const feed = new Feed({
  snapshot: take,
  recent: (records) => { ended = records; requests.add(records, chosen); },
  viewer: ({ manages_models: manages }) => {
    useAlone = null;
    views.allow(true);
    models.allow(manages);
  },
  away: () => { away = true; tellAway(); },
  locked: (error) => {
    if (error instanceof Refused) chatAlone(error);
    else lock(error instanceof key.WrongKey && !key.get() ? "" : error.message);
  },
});

const age = new Age(() => {
  mark(byId("main"), "data-old", age.old);
  away = age.old;
  tell();
  paint(true);
});

function take(snapshot) {
  if (snapshot.started !== server) begin(snapshot);
  latest = snapshot;
  const records = ended.concat(snapshot.ended);
  ended = [];
  list(snapshot.models);
  for (const model of snapshot.models) note(model, snapshot, records.filter((one) => one.model === model.name));
  requests.add(records, chosen);
  models.show(snapshot.models, snapshot.found);
  away = false;
  age.hear();
  tell();
  paint();
}

/** Another server at the same address: what was known of the last one is over. */
function begin(snapshot) {
  server = snapshot.started;
  requests.clear();
  for (const one of known.values()) one.lanes = new Lanes();
}

function note(model, snapshot, records) {
  if (!known.has(model.name)) known.set(model.name, { history: new History(), lanes: new Lanes() });
  const { history, lanes } = known.get(model.name);
  history.add(model, snapshot.at, Date.now() / 1000);
  lanes.update(server, snapshot.at, model.batch?.rows ?? [], records);
}

function list(models) {
  const names = models.map((model) => modelName(model.name) + (model.state === "ready" ? "" : ` (${model.state})`));
  const told = JSON.stringify(names);
  if (select.dataset.told === told) return;
  select.dataset.told = told;
  if (!models.some((model) => model.name === chosen)) choose(models[0].name);
  select.replaceChildren(...models.map((model, place) => make("option", { value: model.name, selected: model.name === chosen }, names[place])));
  select.disabled = models.length < 2;
}

function choose(name) {
  chosen = name;
  requests.show(name);
}

/** In the next frame, once however often it is asked for; a page that nobody sees has none. `all`: also what is not due. */
function paint(all = false) {
  if (!latest) return;
  if (all) slowlyAt = -Infinity;
  frame ||= requestAnimationFrame(show);
}

function show(now) {
  frame = 0;
  const model = current(), { history, lanes } = known.get(chosen);
  const rates = age.old ? NO_RATES : history;
  say(byId("now"), away ? "" : describeNow(model, rates));
  if (!model.batch) return showNone();
  figures.show(model, rates);
  if (views.current === "actors") actors.show(model, rates);
  if (views.current === "server") showBatch(model, lanes);
  if (now - slowlyAt < SLOWLY_MS) return;
  if (slowlyAt < 0) performance.mark("shown"); // For `just bench-page`.
  slowlyAt = now;
  if (views.current === "server") showSlowly(model, history, rates);
  say(byId("about"), describeServer(latest, age.heardAt, model));
}

function showBatch({ scheduler: facts, card }, lanes) {
  timeline.draw(lanes, latest.at);
  say(byId("batch-note"), `${plural(facts.active_sequences, "row")} of ${card.rows}` + waiting(facts));
}

function showSlowly(model, history, rates) {
  plots.draw(history, rates, Date.now() / 1000);
  kv.show(model);
  tiers.show(model);
  rows.show(model.batch, latest.waits.filter((one) => one.model === model.name), latest.at);
}

function waiting({ queued_requests: queued, preempted_sequences: preempted }) {
  return (queued ? `, ${count(queued)} waiting` : "") + (preempted ? `, ${count(preempted)} of them preempted` : "");
}

/** A model that is not loaded has no figures; once it is, everything is due. */
function showNone() {
  figures.blank();
  say(byId("about"), describeServer(latest, age.heardAt));
  slowlyAt = -Infinity;
}

const current = () => latest.models.find((one) => one.name === chosen);

/** At once: a frame may come when the server is away again. */
function tell() {
  const model = current();
  chat.use(chosen, model.card?.images);
  if (away) tellAway();
  else status(model.status === "ok" ? "ok" : model.batch ? "bad" : "away", WORDS[model.status] ?? `Not loaded (${model.state})`);
  mark(byId("main"), "data-loaded", Boolean(model.batch));
  const said = model.batch ? model.detail : absence(model);
  if (byId("notice").hidden !== !said) byId("notice").hidden = !said;
  say(byId("notice"), said);
}

function tellAway() {
  status("away", age.old ? `Reconnecting, last heard at ${clock(age.heardAt / 1000)}` : "Reconnecting");
}

/** Why it is not loaded, and what would have it loaded. */
function absence({ problem }) {
  if (!problem) return "It is loaded when it is asked for: say something to it in the chat.";
  return `It could not be loaded: ${problem.replace(/\.$/, "")}. It is tried again when it is asked for.`;
}

function status(state, words) {
  mark(byId("status"), "data-state", state);
  say(byId("status"), words);
}

/** A key that may not see what others do has the chat, and nothing of what it may not see. */
async function chatAlone(refusal) {
  const listed = await listModels();
  if (!listed) return lock(refusal.message);
  useAlone = (name) => chat.use(name, listed.find((one) => one.id === name).input_modalities?.includes("image"));
  latest = null; // What another key saw here is not this one's.
  select.dataset.told = "";
  select.replaceChildren(...listed.map(({ id }) => make("option", { value: id }, modelName(id))));
  select.disabled = listed.length < 2;
  useAlone(select.value);
  status("ok", "Ready");
}

/** Null where they cannot be had. */
async function listModels() {
  try {
    const response = await fetch("v1/models", { headers: key.headers() });
    return response.ok ? (await response.json()).data : null;
  } catch {
    return null;
  }
}

function lock(problem) {
  age.stop();
  models.allow(false);
  views.allow(false);
  byId("main").hidden = true;
  byId("locked").hidden = false;
  byId("forget").hidden = true;
  say(byId("wrong"), problem);
  status("away", "Locked");
  say(byId("now"), "");
  byId("key").focus();
}

function unlock() {
  byId("main").hidden = false;
  byId("locked").hidden = true;
  byId("forget").hidden = !key.get();
  feed.start();
}

byId("unlock").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = byId("key").value.trim();
  byId("key").value = "";
  if (!key.fits(given)) return lock(key.WRONG);
  key.keep(given);
  unlock();
});
byId("forget").addEventListener("click", () => { key.forget(); feed.stop(); chat.leave(); lock(""); });
select.addEventListener("change", () => {
  if (useAlone) return useAlone(select.value);
  choose(select.value);
  if (latest) tell();
  paint(true);
});
addEventListener("themechange", () => { timeline.recolour(); plots.rebuild(); paint(true); });
addEventListener("widthchange", () => paint(true));
if (key.needed && !key.get()) lock("");
else unlock();
