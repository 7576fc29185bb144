// The cache: what each tier holds, and what of the prompts was not computed.

import { make, parts, say } from "./dom.js";
import { bytes, count, percent } from "./format.js";

export class Tiers {
  #place;
  #note;
  #shown = "";

  constructor(place, note) {
    this.#place = place;
    this.#note = note;
  }

  show(model) {
    const { scheduler: facts, cache, directory, speculation, card } = model;
    const told = JSON.stringify([cache, directory, speculation, facts.total_cached_tokens, facts.total_prefill_tokens]);
    if (told === this.#shown) return;
    this.#shown = told;
    const prompts = facts.total_cached_tokens + facts.total_prefill_tokens;
    say(this.#note, cache.reason ? `off: ${cache.reason}` : "");
    this.#place.replaceChildren(saved(facts, cache, prompts), memory(cache), disk(directory, cache, card), ...drafts(speculation));
  }
}

function tier(name, detail, shares, facts) {
  const meter = make("div", { class: "meter", "aria-hidden": "true" }, ...parts(shares));
  const list = make("dl", { class: "facts" });
  for (const [key, value] of facts) if (value != null) list.append(make("dt", {}, key), make("dd", {}, value));
  return make("div", { class: "tier" }, make("h3", {}, name, make("span", {}, detail)), meter, list);
}

function saved(facts, cache, prompts) {
  const computed = facts.total_prefill_tokens;
  return tier("Prompts so far", percent(facts.total_cached_tokens, prompts), [["cached", facts.total_cached_tokens], ["prefill", computed]], [
    ["Tokens from cache", count(facts.total_cached_tokens)],
    ["Tokens computed", count(computed)],
    ["Waited for another's prefill", count(cache.waited)],
  ]);
}

const PROPOSERS = { ngram: "Right from own text", draft_model: "Right from the draft model", mtp: "Right from the MTP head" };

/** Tokens that were guessed, where any were. */
function drafts({ drafted, accepted, steps, by_proposer }) {
  if (!drafted) return [];
  const proposers = Object.entries(by_proposer).map(([name, of]) => [PROPOSERS[name] ?? name, `${percent(of.accepted, of.drafted)} of ${count(of.drafted)}`]);
  return [tier("Drafts", `${percent(accepted, drafted)} right`, [["decode", accepted], ["", drafted - accepted]], [
    ["Tokens drafted", count(drafted)],
    ["Tokens accepted", count(accepted)],
    ["Steps that verified some", count(steps)],
    ...proposers,
  ])];
}

function memory(cache) {
  const all = Math.max(cache.capacity_bytes, cache.bytes);
  return tier("Memory", `${bytes(cache.bytes)} of ${bytes(all)}`, [["cached", cache.bytes], ["", all - cache.bytes]], [
    ["Blocks", count(cache.blocks)],
    ["Snapshots", cache.snapshots ? count(cache.snapshots) : null],
    ["Blocks found", count(Math.max(0, cache.hits_block - cache.hits_disk))], // Of the disk's, those that are not full are no hits here.
    ["Blocks not found", count(cache.misses)],
    ["Evicted", count(cache.evicted_blocks + cache.evicted_snapshots)],
  ]);
}

function disk(directory, cache, card) {
  if (!directory.attached) return tier("Disk", directory.reason || "off", [], []);
  const all = Math.max(card.ssd_max_bytes, directory.bytes);
  return tier("Disk", `${bytes(directory.bytes)} of ${bytes(all)}`, [["cached", directory.bytes], ["", all - directory.bytes]], [
    ["Blocks", count(directory.blocks)],
    ["Blocks found", count(cache.hits_disk)],
    ["Written", bytes(directory.written_bytes)],
    ["Read", bytes(directory.read_bytes)],
    ["Writes shed", count(directory.shed_writes)],
    ["Damaged", directory.damaged ? count(directory.damaged) : null],
  ]);
}
