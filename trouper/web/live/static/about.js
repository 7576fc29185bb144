// The line at the foot: the server, what it runs on, and what it did.

import { plural, span } from "./format.js";

/** `model`: only one that is loaded. */
export function describeServer({ version, started }, heardAt, model = null) {
  const up = `up for ${span(heardAt / 1000 - started)}`;
  if (!model) return `Trouper ${version} · ${up}`;
  const { card, scheduler: facts } = model;
  const requests = `${plural(facts.requests_completed, "request")} answered, ${facts.requests_withdrawn} withdrawn, ${facts.requests_errored} failed`;
  const device = `${card.architecture}, ${card.dtype} on ${card.device}`;
  return [`Trouper ${version}`, device, describeOff(card.off), up, requests].filter(Boolean).join(" · ");
}

/** What the self-check has turned off, and why. */
function describeOff(off) {
  const features = Object.entries(off).map(([feature, reason]) => `${feature.replace("_", " ")} (${reason})`);
  return features.length ? `turned off: ${features.join(", ")}` : "";
}
