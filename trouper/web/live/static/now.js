// The server in a line, in words of those who use it.

import { bytes, count, percent, plural, short } from "./format.js";

export function describeNow(model, rates) {
  if (!model.batch) return describeAbsent(model);
  const { scheduler: facts, memory } = model;
  const speed = rates.last("generated");
  const said = facts.active_sequences ? [`writing ${plural(facts.active_sequences, "answer")}`] : ["free"];
  if (facts.queued_requests) said.push(`${count(facts.queued_requests)} waiting`);
  if (facts.active_sequences && speed) said.push(`${short(speed)} tokens a second`);
  said.push(memory.limit_bytes ? `${bytes(memory.active_bytes)} of ${bytes(memory.limit_bytes)} memory` : `${bytes(memory.active_bytes)} memory`);
  return said.join(" · ");
}

function describeAbsent({ state, progress }) {
  if (state !== "loading" || !progress) return "";
  return `loading${progress.total ? `, ${percent(progress.done, progress.total)}` : ""}`;
}
