// The events of /events, by fetch, since an EventSource cannot send a token.

import { reply, RefusedError } from "./ask.js";

const AGAIN_MS = 1000;
const NO_STREAM_MS = 30000;

// Calls `hear` with each event, and `state` with "" while connected, else with why not. Ends on `signal`.
export async function follow(hear, state, signal) {
  while (!signal.aborted) {
    let pause = AGAIN_MS;
    try {
      const answer = await reply("events", { signal });
      state("");
      await read(answer.body, hear);
      state("the stream has ended; reconnecting");
    } catch (error) {
      if (signal.aborted) return;
      state(error instanceof RefusedError ? error.message : "no answer; reconnecting");
      if (error instanceof RefusedError && error.status === 404) pause = NO_STREAM_MS;
    }
    await new Promise((done) => {
      const timer = setTimeout(done, pause);
      signal.addEventListener("abort", () => { clearTimeout(timer); done(); }, { once: true });
    });
  }
}

async function read(body, hear) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (left + value).split("\n");
    left = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ")) hear(JSON.parse(line.slice(6)));
    }
  }
}
