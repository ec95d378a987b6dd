// The page: asks /status every two seconds, and sooner after an event; shows what it says.

import { Actions, attempt } from "./actions.js";
import { ask, hasToken, RefusedError, useToken } from "./ask.js";
import { Charts } from "./charts.js";
import { byId, setText } from "./dom.js";
import { knowNamespaces, startExplaining } from "./explain.js";
import { follow } from "./follow.js";
import { History } from "./history.js";
import { EVENTS_SHOWN, knowReasons, showEvent, showStatus } from "./views.js";

const EVERY_MS = 2000;
const FLUSH_MS = 200;
const SOONEST_MS = 1000; // an answer of /status may be as old as that

const history = new History();
const charts = new Charts(byId("charts"));
const actions = new Actions(() => hurry(0));
const guarded = {
  drain: (tier, again) => attempt(() => actions.drain(tier, again)),
  editQuota: (told) => actions.editQuota(told),
  endQuota: (tenant) => attempt(() => actions.endQuota(tenant)),
};
let following = null; // ends the stream of events
let timer = 0;
let askedAt = 0;
let asking = false;
let soon = false; // something has happened since the pending request
let reasonsKnown = false;
let heard = []; // events not yet shown
let signing = false; // the sign-in form is shown, and no requests are made
let entries = 0; // how often someone has signed in: answers to a former token count for nothing

// Ask the server once, and again in two seconds, whatever the result.
async function turn() {
  asking = true;
  soon = false;
  askedAt = performance.now();
  try {
    await look();
  } catch (error) {
    setText(byId("connection"), `The server does not answer: ${error instanceof RefusedError ? error.message : "no answer"}. Trying again.`);
    byId("connection").hidden = false;
  }
  asking = false;
  again(soon ? SOONEST_MS : EVERY_MS);
}

async function look() {
  const entry = entries;
  const rights = await ask("rights");
  if (entry !== entries) return;
  if (!rights.read) {
    signIn(rights.why_not.read, false);
    return;
  }
  if (!reasonsKnown) {
    knowReasons(await ask("ui/reasons.json"));
    reasonsKnown = true;
  }
  const status = await ask("status");
  const past = await ask(`history?after=${history.last}`);
  if (signing || entry !== entries) return;
  history.add(status, Date.now() / 1e3);
  history.append(past);
  showRights(rights);
  show(status);
  byId("connection").hidden = true;
}

function again(inMs) {
  clearTimeout(timer);
  if (!signing) timer = setTimeout(turn, inMs);
}

function hurry(pauseMs = SOONEST_MS) {
  if (asking) soon = true;
  else again(Math.max(0, askedAt + pauseMs - performance.now()));
}

function show(status) {
  byId("sign-in").hidden = true;
  byId("board").hidden = false;
  actions.know(status);
  knowNamespaces(status.namespaces);
  showStatus(status, history, guarded);
  charts.show(history);
  if (!following) {
    following = new AbortController();
    follow(hear, streamState, following.signal);
  }
}

// Events may come by the thousand: the last ones are shown, a few times a second.
function hear(event) {
  if (!heard.length) setTimeout(showHeard, FLUSH_MS);
  heard.push(event);
  if (heard.length > 2 * EVENTS_SHOWN) heard = heard.slice(-EVENTS_SHOWN);
}

function showHeard() {
  heard.slice(-EVENTS_SHOWN).forEach(showEvent);
  heard = [];
  hurry();
}

function streamState(why) {
  byId("events-why").hidden = why === "";
  setText(byId("events-why"), why);
  byId("events").dataset.connected = String(why === "");
}

function showRights(rights) {
  document.body.classList.toggle("may-change", rights.change);
  byId("forms").hidden = rights.change === false;
  byId("may-not").hidden = byId("sign-in-again").hidden = rights.change;
  setText(byId("may-not"), rights.why_not.change ?? "");
  byId("sign-out").hidden = !hasToken();
}

// `back`: the previous view is available without a token.
function signIn(why, back) {
  signing = true;
  clearTimeout(timer);
  unfollow();
  byId("board").hidden = byId("connection").hidden = true;
  byId("sign-in").hidden = false;
  byId("sign-in-back").hidden = !back;
  byId("sign-out").hidden = !hasToken();
  setText(byId("sign-in-why"), why);
  byId("token").focus();
}

function signedIn() {
  signing = false;
  entries += 1;
  byId("token").value = "";
  unfollow();
  turn();
}

function unfollow() {
  following?.abort();
  following = null;
}

byId("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  useToken(byId("token").value.trim());
  signedIn();
});
byId("sign-in-back").addEventListener("click", signedIn);
byId("sign-in-again").addEventListener("click", () => signIn("Give a token that allows changes.", true));
byId("sign-out").addEventListener("click", () => {
  useToken("");
  location.reload(); // clears what was shown
});
startExplaining();
turn();
