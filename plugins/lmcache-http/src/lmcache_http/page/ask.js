// Requests to the process that served this page, and to nobody else.

const KEPT_AS = "lmcache-core token";
let token = remembered();

export class RefusedError extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

function remembered() {
  try {
    return sessionStorage.getItem(KEPT_AS) ?? "";
  } catch {
    return ""; // storage is disabled in this browser: the token lives as long as the page
  }
}

export function hasToken() {
  return token !== "";
}

// Kept only in this tab, until it is closed. Empty: forget it.
export function useToken(said) {
  token = said;
  try {
    if (said) sessionStorage.setItem(KEPT_AS, said);
    else sessionStorage.removeItem(KEPT_AS);
  } catch {
    // as above
  }
}

// The reply, whatever its type. Throws RefusedError with the text of the answer, and TypeError if there is no answer.
export async function reply(path, { method = "GET", body, signal } = {}) {
  const headers = {};
  if (token) headers.Authorization = `Bearer ${token}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, {
    method, headers, signal, cache: "no-store", credentials: "omit", redirect: "error",
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (!answer.ok) throw new RefusedError(answer.status, await why(answer));
  return answer;
}

export async function ask(path, options) {
  return (await reply(path, options)).json();
}

async function why(answer) {
  try {
    return (await answer.json()).detail ?? answer.statusText;
  } catch {
    return `${answer.status} ${answer.statusText}`;
  }
}
