// Ask the server: JSON, and the stream of events. A token, where one is asked for, lives as long as this tab.

const KEY = "headway-token";
const RETRY_MS = [500, 1000, 2000, 5000];

/** What a server said instead of an answer. */
export class Problem extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

async function ask(path) {
  const token = sessionStorage.getItem(KEY);
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const reply = await fetch(path, { headers });
  if (reply.status === 401) {
    await askForToken(token !== null);
    return ask(path);
  }
  return reply;
}

/** The JSON at a path. Throws a Problem when the server answers with one. */
export async function get(path) {
  const reply = await ask(path);
  if (!reply.ok) {
    const problem = await reply.json().catch(() => ({}));
    throw new Problem(reply.status, problem.detail ?? `${path}: ${reply.status} ${reply.statusText}`);
  }
  return reply.json();
}

let asking = null;

function askForToken(wasWrong) {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("token");
    const value = document.getElementById("token-value");
    document.getElementById("token-error").textContent = wasWrong ? "This is not the token." : "";
    value.value = "";
    dialog.addEventListener("close", () => {
      sessionStorage.setItem(KEY, value.value);
      asking = null;
      resolve();
    }, { once: true });
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    dialog.showModal();
  });
  return asking;
}

/**
 * Follow the events of a run until it is over.
 * hear(name, data) gets each event; tell("live" | "lost" | "over") how the connection is.
 */
export async function follow(path, hear, tell) {
  for (let attempt = 0; ; attempt += 1) {
    try {
      const reply = await ask(path);
      if (reply.status === 204) return tell("over");
      if (!reply.ok) throw new Problem(reply.status, reply.statusText);
      tell("live");
      attempt = 0;
      for await (const [name, data] of eventsOf(reply.body)) hear(name, data);
    } catch (error) {
      if (!(error instanceof TypeError || error instanceof Problem)) throw error;
    }
    tell("lost");
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS[Math.min(attempt, RETRY_MS.length - 1)]));
  }
}

async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split(/\r?\n\r?\n/);
    rest = parts.pop();
    for (const part of parts) {
      const event = { event: "message", data: "" };
      for (const line of part.split(/\r?\n/)) {
        const [, field, text] = /^(\w*):? ?(.*)$/.exec(line) ?? [];
        if (field === "data") event.data += text;
        else if (field) event[field] = text;
      }
      if (event.data) yield [event.event, JSON.parse(event.data)];
    }
  }
}
