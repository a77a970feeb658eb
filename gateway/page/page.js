"use strict";
// The status page: what runs, from /v1/status/events, and a playground on /v1/chat/completions.

const $ = (id) => document.getElementById(id);
const store = sessionStorage;
const WINDOW = 60; // looks that rates and percentiles are of, one a second
const looks = [];

function headers(more = {}) {
  const key = store.getItem("key");
  return key ? { ...more, authorization: `Bearer ${key}` } : more;
}

// Yields [id, data] of each event. EventSource cannot send a key, so the stream is read here.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
      let id = null, data = [];
      for (const line of text.slice(0, end).split("\n")) {
        if (line.startsWith("id: ")) id = line.slice(4);
        if (line.startsWith("data: ")) data.push(line.slice(6));
      }
      if (data.length) yield [id, data.join("\n")];
    }
  }
}

async function reason(response) {
  const body = await response.json().catch(() => ({}));
  return body.error?.message || `status ${response.status}`;
}

// --- what runs ---

async function watch() {
  for (;;) {
    try {
      const response = await fetch("v1/status/events", { headers: headers() });
      if (!response.ok) throw new Error(await reason(response));
      for await (const [, data] of events(response)) show(JSON.parse(data));
      tell("the gateway ended the stream; connecting", "warn");
    } catch (error) {
      tell(`not connected: ${error.message}`, "bad");
    }
    await new Promise((done) => setTimeout(done, 1000));
  }
}

function tell(text, kind) {
  if ($("state").textContent === text) return; // a screen reader would read it again
  $("state").textContent = text;
  $("state").className = kind;
}

function show(seen) {
  if (seen.error) return tell(seen.error, "bad");
  looks.push(seen);
  if (looks.length > WINDOW) looks.shift();
  $("version").textContent = seen.version;
  const serving = seen.workers.filter((each) => each.state === "serving").length;
  if (!seen.workers.length) tell("no worker serves any model", "bad");
  else if (serving < seen.workers.length) tell(`${serving} of ${seen.workers.length} workers serve`, "warn");
  else if (!seen.has_housekeeping) tell("no housekeeping runs: webhooks and batches wait", "warn");
  else tell(`${serving} ${serving === 1 ? "worker serves" : "workers serve"}`, "good");
  figures(seen);
  table("models", ["model", "workers", "queued", "running", "ended", "held back", "tokens/s", "crashes", "dead letters"],
    seen.models.map((model) => [
      named(model), model.num_workers, model.num_queued, model.num_running, model.num_ended, held(model),
      rate((look) => look.models.find((one) => one.name === model.name)?.generation_tokens),
      flagged(model.crashed || 0), flagged(model.num_dead_letters),
    ]), "no model was ever served here");
  table("workers", ["worker", "model", "state", "running", "waiting", "KV blocks", "tokens/s", "prefix hits", "preempted"],
    seen.workers.map((each) => [
      each.worker, served(each), state(each.state), `${each.num_running} of ${each.max_num_seqs}`,
      each.num_waiting, meter(each.num_held_blocks, each.num_blocks),
      rate((look) => look.workers.find((one) => one.worker === each.worker)?.generation_tokens),
      each.prompt_tokens ? percent(each.cached_tokens / each.prompt_tokens) : "–", each.num_preemptions,
    ]), "no worker is there");
  accounts(seen.accounts);
  table("storage", ["tenant", "MB", "things"],
    seen.storage.map((each) => [each.tenant, (each.used_bytes / 1e6).toFixed(1), each.num_things]),
    "nothing is stored");
  jobs(seen.jobs, seen.now_ms);
  const chats = seen.models.filter((each) => each.chats);
  models(chats.sort((one, other) => !one.num_workers - !other.num_workers).map((each) => each.name));
}

// Each account's share is of the tokens of the last looks, over all accounts of its model.
function accounts(rows) {
  const made = new Map(rows.map((each) => [each, rate((look) => used(look, each.model, each.name))]));
  const all = (model) => rows.filter((each) => each.model === model).reduce((total, each) => total + made.get(each), 0);
  table("accounts", ["account", "model", "weight", "share", "tokens/s", "queued", "running", "held back", "today", "this month"],
    rows.map((each) => [
      each.name, text(each.model), each.weight, all(each.model) ? percent(made.get(each) / all(each.model)) : "–",
      made.get(each), each.num_queued, limited(each.num_running, each.max_running), each.blocked || "–",
      limited(each.tokens_today, each.tokens_per_day), limited(each.tokens_this_month, each.tokens_per_month),
    ]), "no job was submitted today");
}

const used = (look, model, name) =>
  look.accounts.find((each) => each.model === model && each.name === name)?.tokens_today || 0;
const limited = (value, most) => most ? `${number(value)} of ${number(most)}` : value;

// --- jobs, and what befell each ---

const opened = new Set(); // ids of the jobs whose timeline is shown in words

function jobs(rows, now_ms) {
  if ($("jobs").querySelector(":active")) return; // a click is under way, and needs its target
  const focused = document.activeElement?.dataset?.job;
  table("jobs", ["job", "model", "state", "tokens", "queue", "first token", "in all", "timeline"],
    rows.map((job) => {
      const spent = parts(job, now_ms);
      return [
        told(job), text(job.model), outcome(job), job.num_tokens,
        span((spent.began ?? spent.end) - job.created_ms),
        spent.first === null ? "–" : span(spent.first - job.created_ms),
        span(spent.end - job.created_ms), bar(job, spent),
      ];
    }), "no job of this tenant yet");
  if (focused) document.querySelector(`[data-job="${CSS.escape(focused)}"]`)?.focus();
}

// The stretches of a job's life, each with its kind and its length.
function parts(job, now_ms) {
  const end = job.ended_ms ?? Math.max(now_ms, job.created_ms), found = [];
  let began = null, first = null, kind = "queued", since = job.created_ms;
  const turn = (next, at_ms) => {
    found.push({ kind, ms: Math.max(0, at_ms - since) });
    [kind, since] = [next, at_ms];
  };
  for (const { what, at_ms } of job.timeline) {
    if (what === "started") { began ??= at_ms; turn(first === null ? "prefill" : "decode", at_ms); }
    if (what === "first_token") { first ??= at_ms; turn("decode", at_ms); }
    if (what === "requeued" || what === "set_aside") turn("lost", at_ms);
  }
  turn(kind, end);
  return { found, began, first, end };
}

const STATES = { ready: "waits", admitting: "starts", decoding: "runs" };

function outcome(job) {
  const kinds = { succeeded: "good", failed: "bad", dead: "bad", expired: "warn", cancelled: "warn" };
  return Object.assign(element("span", STATES[job.state] || job.state), { className: `text ${kinds[job.state] || ""}` });
}

function span(ms) {
  if (ms < 1000) return `${Math.round(ms)} ms`;
  return ms < 60000 ? `${(ms / 1000).toFixed(1)} s` : `${Math.round(ms / 60000)} min`;
}

function bar(job, { found, end }) {
  const made = document.createElement("div");
  made.className = "text bar";
  made.setAttribute("role", "img");
  made.setAttribute("aria-label", found.map((each) => `${each.kind} ${span(each.ms)}`).join(", "));
  const all = Math.max(1, end - job.created_ms);
  for (const { kind, ms } of found) {
    const piece = document.createElement("i");
    piece.className = kind;
    piece.style.flexGrow = ms / all;
    if (ms > 0) made.append(piece);
  }
  return made;
}

const HOW = {
  handed_back: "its worker handed it back", left: "its worker left", crashed: "its worker crashed",
  lapsed: "its worker's lease ran out", log_differs: "its worker did not continue its log",
  lost: "it was in no queue", model_back: "a worker of its model is back",
};

function told(job) {
  const made = document.createElement("details"), list = document.createElement("ol");
  made.open = opened.has(job.job_id);
  made.addEventListener("toggle", () => made.open ? opened.add(job.job_id) : opened.delete(job.job_id));
  const head = element("summary", job.job_id.slice(-8));
  head.title = job.job_id;
  head.dataset.job = job.job_id;
  for (const { what, at_ms, worker, why } of job.timeline) {
    const words = { queued: "queued", started: `started by ${worker}`, first_token: "first token",
      requeued: `queued again: ${HOW[why] || why}`, set_aside: "waits for a worker of its model" };
    list.append(element("li", `${span(at_ms - job.created_ms)}: ${words[what] || what}`));
  }
  made.append(head, element("p", job.job_id), list);
  return made;
}

function figures(seen) {
  const shown = {
    "tokens/s": rate((look) => sum(look.workers, "generation_tokens")),
    "running": sum(seen.models, "num_running"),
    "queued": sum(seen.models, "num_queued"),
    "TTFT p50": latency("ttft", 0.5), "TTFT p95": latency("ttft", 0.95),
    "ITL p50": latency("itl", 0.5), "ITL p95": latency("itl", 0.95),
    "dead letters": sum(seen.models, "num_dead_letters"),
  };
  const boxes = Object.entries(shown).map(([name, value]) => {
    const box = document.createElement("div");
    box.append(element("dt", name), element("dd", number(value)));
    return box;
  });
  $("figures").replaceChildren(...boxes);
}

const sum = (rows, field) => rows.reduce((total, row) => total + row[field], 0);
const percent = (share) => `${Math.round(100 * share)} %`;
const number = (value) => typeof value === "number" ? value.toLocaleString("en") : value;
const text = (value) => Object.assign(element("span", value), { className: "text" });

function named(model) {
  if (!model.is_paused) return model.name;
  const name = text(model.name);
  name.append(" ", Object.assign(element("span", "paused"), { className: "warn" }));
  return name;
}

function served(worker) {
  const others = worker.models.filter((each) => each !== worker.model);
  const made = text(others.length ? `${worker.model} and ${others.length} more` : worker.model);
  made.title = worker.models.join(", ");
  return made;
}

function held(model) {
  const parts = Object.entries({ ...model.by_reason, delayed: model.num_delayed }).filter(([, count]) => count);
  return parts.map(([name, count]) => `${count} ${name}`).join(", ") || 0;
}

// The growth of a counter a second, over the looks since it last fell, as at a worker's restart.
function rate(counter) {
  let last = looks.length - 1, first = last;
  while (first > 0 && looks.length - first < 10 && counter(looks[first - 1]) <= counter(looks[first])) first--;
  const seconds = (looks[last].now_ms - looks[first].now_ms) / 1000;
  return seconds > 0 ? Math.round((counter(looks[last]) - counter(looks[first])) / seconds) : 0;
}

// A percentile of the last minute, or of all that the workers counted where nothing came in it or
// one of them left.
function latency(name, share) {
  const { bounds_s, counts } = looks.at(-1).latencies[name];
  const before = looks[0].latencies[name].counts;
  const of = (all) => bounds_s.map((_, at) => sum(Object.values(all), at));
  const now = of(counts), old = looks.length > 1 ? of(before) : now.map(() => 0);
  const lately = now.map((count, at) => count - old[at]);
  const used = lately.at(-1) > 0 && lately.every((count) => count >= 0) ? lately : now;
  if (!used.at(-1)) return "–";
  const wanted = share * used.at(-1), at = used.findIndex((count) => count >= wanted);
  const low = at ? bounds_s[at - 1] : 0, below = at ? used[at - 1] : 0;
  const ms = 1000 * (low + (bounds_s[at] - low) * (wanted - below) / (used[at] - below || 1));
  return ms >= 1000 ? `${(ms / 1000).toFixed(1)} s` : `${ms.toFixed(ms < 10 ? 1 : 0)} ms`;
}

function element(name, content) {
  const made = document.createElement(name);
  made.append(content);
  return made;
}

function state(name) {
  const kinds = { serving: "good", draining: "warn", asleep: "warn", stalled: "bad", lost: "bad" };
  return Object.assign(element("span", name), { className: `text ${kinds[name]}` });
}

function flagged(count) {
  return count ? Object.assign(element("span", number(count)), { className: "bad" }) : 0;
}

function meter(value, max) {
  const made = document.createElement("meter");
  Object.assign(made, { min: 0, max: max || 1, value });
  const cell = element("span", made);
  cell.append(` ${percent(max ? value / max : 0)}`);
  return cell;
}

function table(id, names, rows, none) {
  const head = element("tr", "");
  for (const name of names) head.append(Object.assign(element("th", name), { scope: "col" }));
  const body = rows.map((row) => {
    const line = element("tr", "");
    for (const value of row) {
      const cell = element("td", value instanceof Node ? value : String(number(value)));
      if (value.className?.startsWith("text")) cell.className = "text";
      line.append(cell);
    }
    return line;
  });
  if (!body.length) {
    const cell = Object.assign(element("td", none), { colSpan: names.length, className: "none" });
    body.push(element("tr", cell));
  }
  for (const [at, value] of (rows[0] || []).entries()) {
    if (value.className?.startsWith("text")) head.children[at].className = "text";
  }
  const thead = element("thead", head), tbody = document.createElement("tbody");
  tbody.append(...body);
  $(id).replaceChildren(thead, tbody);
}

function models(names) {
  const select = $("model");
  if (names.join("\n") === [...select.options].map((each) => each.value).join("\n")) return;
  const chosen = select.value || store.getItem("model");
  select.replaceChildren(...names.map((name) => new Option(name, name, false, name === chosen)));
}

// --- the playground ---
// What is asked lies in the tab's storage, with the id of the last event that was shown. Under the
// same Idempotency-Key the same job is found again, and Last-Event-ID tells where to go on.

let asking = null, waits = null;

// Shows and keeps what came, at most every 50 ms: to do so for each token would keep the page busy.
function soon(asked) {
  waits ||= { asked, timer: setTimeout(flush, 50) };
}

function flush() {
  if (!waits) return;
  const { asked, timer } = waits;
  waits = null;
  clearTimeout(timer);
  $("answer").textContent = asked.text;
  store.setItem("asked", JSON.stringify(asked));
}

function question() {
  const body = {
    model: $("model").value,
    messages: [{ role: "user", content: $("message").value }],
    max_tokens: Number($("max-tokens").value),
    stream: true,
  };
  const schema = $("schema").value.trim();
  if (schema) {
    const json_schema = { name: "answer", schema: JSON.parse(schema), strict: true };
    body.response_format = { type: "json_schema", json_schema };
  }
  return { key: crypto.randomUUID?.() || String(Math.random()).slice(2), body, id: null, text: "", job: null };
}

async function follow(asked) {
  asking = new AbortController();
  const { signal } = asking;
  $("stop").disabled = false;
  $("send").disabled = true;
  $("answer").textContent = asked.text;
  said(asked.id ? "going on" : "waiting");
  try {
    for (let tries = 0; !(await streamed(asked, signal)); tries++) {
      said(`the connection broke; going on after ${asked.text.length} characters`);
      await new Promise((done) => setTimeout(done, Math.min(5000, 500 * 2 ** tries)));
    }
  } catch (error) {
    said(error.name === "AbortError" ? "stopped" : error.message, error.name === "AbortError" ? "" : "bad");
  }
  flush();
  store.removeItem("asked");
  $("stop").disabled = true;
  $("send").disabled = false;
}

// Returns whether the answer is whole; false where the connection broke.
async function streamed(asked, signal) {
  const sent = headers({ "content-type": "application/json", "idempotency-key": asked.key });
  if (asked.id) sent["last-event-id"] = asked.id;
  let response;
  try {
    response = await fetch("v1/chat/completions", {
      method: "POST", headers: sent, body: JSON.stringify(asked.body), signal,
    });
  } catch (error) {
    if (signal.aborted) throw error;
    return false;
  }
  if ([502, 503, 504].includes(response.status) && asked.id) return false;
  if (!response.ok) throw new Error(await reason(response));
  try {
    for await (const [id, data] of events(response)) {
      if (data === "[DONE]") return true;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      for (const choice of chunk.choices) {
        asked.text += choice.delta?.content || "";
        if (choice.finish_reason) said(`ended: ${choice.finish_reason}`);
        else said("streaming");
      }
      asked.job = chunk.id.replace(/^(chatcmpl-|cmpl-)/, "");
      if (id) asked.id = id;
      soon(asked);
    }
  } catch (error) {
    // The network's, or the end of this page, which nobody asked for.
    if (!signal.aborted && (error instanceof TypeError || error.name === "AbortError")) return false;
    throw error;
  }
  return false;
}

function said(text, kind = "") {
  $("told").textContent = text;
  $("told").className = kind;
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  let asked;
  try {
    asked = question();
  } catch (error) {
    return said(`the schema is no JSON: ${error.message}`, "bad");
  }
  store.setItem("model", asked.body.model);
  store.setItem("asked", JSON.stringify(asked));
  follow(asked);
});
$("stop").addEventListener("click", () => {
  flush();
  const { job } = JSON.parse(store.getItem("asked") || "{}");
  if (job) fetch(`v1/jobs/${encodeURIComponent(job)}/cancel`, { method: "POST", headers: headers() });
  asking?.abort();
});
$("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit();
});
$("key").value = store.getItem("key") || "";
$("key").addEventListener("change", () => store.setItem("key", $("key").value.trim()));

addEventListener("pagehide", flush);

watch();
const before = store.getItem("asked");
if (before) {
  const asked = JSON.parse(before);
  $("message").value = asked.body.messages[0].content;
  follow(asked);
}
