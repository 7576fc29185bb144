// The AI SDK: generateText and streamText by four of its providers.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import assert from "node:assert/strict";
import { z } from "zod";

const url = process.argv[2];
const CALLS = [
  ["weigh", { place: 'Oslo "Ø"\n<north>', options: { unit: "g", counts: [1, 2] } }],
  ["weigh", { place: "Rome", options: { unit: "kg", counts: [] } }],
  ["note", { text: "2 < 3 & that is all" }],
];

function toolsOf(called) {
  const execute = (name) => async (given) => {
    called.push([name, given]);
    if (name === "note") return "noted";
    return `${given.place.split(/\s/)[0]}=${given.options.counts.reduce((sum, one) => sum + one, 0)}`;
  };
  const options = z.object({ unit: z.string(), counts: z.array(z.number().int()) });
  return {
    weigh: tool({ description: "Weigh", inputSchema: z.object({ place: z.string(), options }), execute: execute("weigh") }),
    note: tool({ description: "Note", inputSchema: z.object({ text: z.string() }), execute: execute("note") }),
  };
}

async function run(model, streamed) {
  const called = [];
  const asked = {
    model,
    tools: toolsOf(called),
    stopWhen: stepCountIs(8),
    system: "You weigh things.",
    prompt: "What do the scales say?",
    maxRetries: 0,
  };
  let failure;
  const result = streamed
    ? streamText({ ...asked, onError: ({ error }) => (failure = error) })
    : await generateText(asked);
  if (streamed) for await (const _ of result.fullStream);
  if (failure) throw failure;
  const [text, steps, usage] = [await result.text, await result.steps, await result.totalUsage];
  const order = (calls) => calls.map((call) => JSON.stringify(call)).sort();
  assert.deepEqual(order(called), order(CALLS));
  for (const part of ["All done: ", "Oslo=3", "Rome=0", "noted"]) assert.ok(text.includes(part), text);
  const reasons = steps.map((step) => step.finishReason); // Some formats have one call in an answer.
  assert.equal(reasons.pop(), "stop");
  assert.deepEqual([...new Set(reasons)], ["tool-calls"]);
  const ids = steps.flatMap((step) => step.toolCalls.map((call) => call.toolCallId));
  assert.equal(new Set(ids).size, 3);
  assert.ok(usage.inputTokens > 20 && usage.outputTokens > 5, JSON.stringify(usage));
}

// A prompt beyond the context ends in an error that is not repeated and says what is full.
async function overflow(model, streamed) {
  const asked = { model, prompt: "word ".repeat(150_000), maxRetries: 0 };
  let failure;
  try {
    const result = streamed ? streamText({ ...asked, onError: ({ error }) => (failure = error) }) : await generateText(asked);
    if (streamed) for await (const _ of result.fullStream);
  } catch (error) {
    failure ??= error;
  }
  const said = `${failure?.message} ${JSON.stringify(failure)}`;
  assert.ok(/prompt is too long/i.test(said) && /context|maximum/i.test(said), said);
  if (failure.statusCode) assert.ok(failure.statusCode === 400 && !failure.isRetryable, said);
}

const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "trouper", baseURL: `${url}/v1`, apiKey: "none", includeUsage: true });
const models = {
  "openai-compatible": compatible("any"),
  "openai, chat": openai.chat("any"),
  "openai, responses": openai.responses("any"),
  anthropic: createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })("any"),
};
for (const [name, model] of Object.entries(models)) {
  for (const streamed of [false, true]) {
    for (const [kind, what] of [[name, run], [`${name}, full context`, overflow]]) {
      let detail = "";
      await what(model, streamed).catch((error) => (detail = `${error.name}: ${error.message} ${error.responseBody ?? ""}`));
      console.log(`CASE ${JSON.stringify({ case: kind, streamed, ok: !detail, detail: detail.slice(0, 600) })}`);
    }
  }
}
