"use strict";
// Text from the service goes through textContent only: run ids and error messages are written by trainers.
const $ = (id) => document.getElementById(id);
const PHASES = ["stage", "seal", "prepare", "commit"];
const STALE_MS = 4000;
const REFUSAL_MS = 20000;
const SECONDS = (s) => Math.max(60, Math.min(s.plot.tokens.length, Math.ceil(s.uptime_s))); // that a plot shows
let token = sessionStorage.getItem("token") || "";
let last = 0; // when the last event came, ms
let shown = null; // the last snapshot
let hover = null; // {plot, second}: where the pointer is

// Elements and numbers

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "text", "circle", "rect"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.assign(element.style, value);
    else if (value !== null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

function text(id, value, tone = "") {
  $(id).textContent = value;
  $(id).className = tone;
}

function number(value) {
  if (value >= 1e6) return (value / 1e6).toFixed(1) + "M";
  if (value >= 1e4) return (value / 1e3).toFixed(value >= 1e5 ? 0 : 1) + "k";
  return value >= 100 || Number.isInteger(value) ? String(Math.round(value)) : value.toFixed(1);
}

function bytes(value) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (value < 1000 || unit === "GB") return (value < 10 && unit !== "B" ? value.toFixed(1) : Math.round(value)) + " " + unit;
    value /= 1000;
  }
}

function lasting(seconds) {
  if (seconds < 1) return Math.round(seconds * 1000) + " ms";
  if (seconds < 10) return seconds.toFixed(1) + " s";
  if (seconds < 60) return Math.round(seconds) + " s";
  if (seconds < 3600) return Math.floor(seconds / 60) + " min " + Math.floor(seconds % 60) + " s";
  return seconds < 86400 ? Math.floor(seconds / 3600) + " h " + Math.floor((seconds % 3600) / 60) + " min" : Math.floor(seconds / 86400) + " d";
}

const ago = (now, time) => (now - time < 60 ? Math.max(0, Math.floor(now - time)) + " s ago" : lasting(now - time) + " ago");
const roughly = (seconds) => (seconds < 60 ? Math.round(seconds) + " s" : seconds < 3600 ? Math.round(seconds / 60) + " min" : Math.round(seconds / 3600) + " h");
const clock = (time) => new Date(time * 1000).toLocaleTimeString();
const sum = (values) => values.reduce((a, b) => a + b, 0);
const count = (n, one) => n + " " + one + (n === 1 ? "" : "s");

// Sections

function head(s) {
  document.title = (s.live ? "v" + s.live.version + " · " : "") + s.model;
  $("model").textContent = s.model;
  $("service").textContent = s.name + " · up " + lasting(s.uptime_s);
  const [word, tone] = s.pause ? ["paused (" + s.pause.mode + ")", "warn"]
    : s.cleared.length ? ["cleared", "warn"] : s.ready ? ["serving", "good"] : ["not ready", "bad"];
  state(word, tone);
  $("pause").disabled = !!s.pause;
  $("resume").disabled = !s.pause;
  $("store-notice").hidden = s.store_connected;
  $("pause-notice").hidden = !s.pause;
  if (s.pause) $("pause-notice").textContent = pauseNotice(s);
}

function pauseNotice(s) {
  const frozen = sum(s.replicas.map((r) => r.running + r.waiting)), waiting = s.held + sum(s.replicas.map((r) => r.held));
  const left = s.pause.lease_left_s;
  return `Paused for ${roughly(s.time - s.pause.since)}: ${count(frozen, "request")} frozen, ${waiting} held. `
    + (left !== null ? `It goes on by itself in ${roughly(left)}.` : "It goes on when somebody resumes it, or when a lease that the replicas hold runs out.");
}

function state(word, tone) {
  $("state").textContent = word;
  $("state").dataset.tone = tone;
}

function nameOf(s, v) {
  return s.names[v.version + " " + v.digest];
}

function tiles(s) {
  const running = sum(s.replicas.map((r) => r.running)), waiting = sum(s.replicas.map((r) => r.waiting));
  const inside = sum(s.replicas.map((r) => r.held)), recent = s.plot.tokens.slice(-10);
  const named = s.live && nameOf(s, s.live);
  text("version", s.live ? named || String(s.live.version) : "none");
  $("version").title = s.live ? "digest " + s.live.digest : "";
  const run = (named ? "version " + s.live.version + ", " : "") + (s.live && s.live.run_id ? "run " + s.live.run_id : "from the checkpoint");
  $("version-note").textContent = s.live ? run + (s.live_since ? ", " + ago(s.time, s.live_since) : "") : "";
  text("skew", String(s.skew), s.skew ? "bad" : "");
  text("running", number(running));
  $("running-note").textContent = s.pause ? "frozen by the pause" : waiting + " waiting for room";
  text("held", number(s.held + inside), s.held + inside ? "warn" : "");
  $("held-note").textContent = s.pause ? "until it goes on" : s.held + inside ? "until a replica is ready" : "nothing waits";
  text("rate", number(sum(recent) / recent.length));
  const share = s.wasted_tokens / Math.max(1, s.wasted_tokens + s.generation_tokens);
  text("wasted", (100 * share).toFixed(1) + "%", share > 0.2 ? "warn" : "");
}

function isOther(s, r) {
  return s.live && r.version === s.live.version && r.digest !== s.live.digest;
}

function replicas(s) {
  $("replicas").replaceChildren(...s.replicas.map((r) => {
    const tone = r.ready ? (r.state === "serving" ? "good" : "warn") : r.state === "unreachable" || r.state === "failed" ? "bad" : "warn";
    const use = r.kv_blocks ? Math.round((100 * r.kv_blocks_used) / r.kv_blocks) : 0;
    const work = `${r.running} running, ${r.waiting} waiting, ${r.held} held, KV ${use}%` + (r.lost ? `, lost ${count(r.lost, "time")}` : "");
    return make("div", { class: "replica" },
      make("div", { class: "line1" }, make("b", {}, "replica " + r.replica),
        make("span", { class: "pill", "data-tone": tone }, r.state),
        make("span", { title: r.digest && "digest " + r.digest }, r.version === null ? "no version" : "version " + r.version + (isOther(s, r) ? ", other weights" : ""))),
      make("p", {}, r.reason || work),
      make("div", { class: "kv", title: `KV cache: ${r.kv_blocks_used} of ${r.kv_blocks} blocks` }, make("i", { style: { width: use + "%" } })),
      make("div", { class: "ranks" }, ...r.ranks.map((k) => make("span", { "data-tone": k.alive ? "good" : "bad" },
        k.alive ? `rank ${k.rank} · pid ${k.pid} · ${bytes(k.rss_bytes)}` : `rank ${k.rank} · gone`))));
  }));
}

function versions(s) {
  const list = s.history.slice().reverse().slice(0, 12);
  const total = (h) => sum(Object.values(h.seconds || {}));
  const longest = Math.max(1e-3, ...list.map(total));
  $("versions").classList.toggle("named", Object.keys(s.names).length > 0);
  $("versions").replaceChildren(
    make("div", { class: "version head" }, ...["version", "bytes", "phases", "took", "stall", "went live"].map((w) => make("span", {}, w))),
    ...list.map((h) => {
      const live = s.live && h.epoch === s.live.epoch, stalls = Object.values(h.stall_ms || {});
      const parts = PHASES.filter((phase) => (h.seconds || {})[phase] > 0);
      return make("div", { class: "version", title: [h.source, h.client, h.run_id && "run " + h.run_id, "digest " + h.digest].filter(Boolean).join(" · ") },
        make("span", {}, make("b", {}, String(h.version)), nameOf(s, h) ? make("span", { class: "name", title: nameOf(s, h) }, nameOf(s, h)) : null, live ? make("span", { class: "tag" }, "live") : null),
        make("span", { class: "dim" }, h.bytes ? bytes(h.bytes) : h.source),
        make("div", { class: "bar" }, ...parts.map((phase) => make("i", {
          "data-phase": phase, title: phase + " " + lasting(h.seconds[phase]), style: { width: (100 * h.seconds[phase]) / longest + "%" },
        }))),
        make("span", {}, parts.length ? lasting(total(h)) : "–"),
        make("span", { class: "dim" }, stalls.length ? make("span", { class: "phone" }, "stall ") : null, stalls.length ? Math.max(...stalls).toFixed(1) + " ms" : "–"),
        make("span", { class: "dim" }, ago(s.time, h.time)));
    }));
  const push = s.session;
  $("session").hidden = !push;
  if (!push) return;
  const done = push.bytes ? Math.min(1, (push.verified_bytes || 0) / push.bytes) : 0;
  $("session").replaceChildren(
    `Version ${push.version ?? ""} is on its way: ${[push.state, push.transport].filter(Boolean).join(", ")}; `
      + `${bytes(push.verified_bytes || 0)} of ${bytes(push.bytes || 0)} verified`,
    make("div", { class: "track" }, make("i", { style: { width: 100 * done + "%" } })));
}

function adapters(s) {
  $("adapters-card").hidden = s.adapters.length === 0;
  $("adapters").replaceChildren(
    make("div", { class: "adapter head" }, ...["adapter", "version", "shape", "served by", "last push"].map((w) => make("span", {}, w))),
    ...s.adapters.map((a) => {
      const epochs = Object.values(a.replicas), serving = epochs.filter((epoch) => epoch !== null && epoch === a.epoch).length;
      const push = a.session ? a.session.state : a.last_push ? ago(s.time, a.last_push.time) : "–";
      return make("div", { class: "adapter", title: [a.run_id && "run " + a.run_id, a.last_error && `${a.last_error.message} (${ago(s.time, a.last_error.time)})`].filter(Boolean).join(" · ") },
        make("b", {}, a.name),
        make("span", {}, a.version === null ? "–" : String(a.version)),
        make("span", { class: "dim" }, `rank ${a.rank}, ${count(a.modules, "module")}, ${bytes(a.bytes)}`),
        make("span", { "data-tone": serving < epochs.length ? "warn" : "" }, `${serving} of ${epochs.length}`),
        make("span", { class: "dim" }, push));
    }));
}

function troubles(s) {
  const items = s.troubles.map((t) => make("li", {}, make("small", {},
    `${clock(t.time)} · ${t.source}` + (t.times > 1 ? ` · ${t.times} times` : "")), t.message));
  $("troubles").replaceChildren(...(items.length ? items : [make("li", { class: "empty" }, "Nothing went wrong.")]));
}

// Plots: seconds along x, both with the same axis, a dashed line where a version went live

function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 2.5, 5, 10].map((step) => step * power).find((step) => step >= value) || 1;
}

function plot(id, s, all, draw, unit) {
  const values = all.slice(-SECONDS(s)), start = s.plot.start + all.length - values.length;
  const svg = $(id), width = svg.clientWidth, height = svg.clientHeight, left = 44, bottom = height - 20, top = 8;
  const high = ceiling(Math.max(...values)), step = (width - left) / (values.length - 1);
  const x = (i) => left + i * step, y = (v) => bottom - (v / high) * (bottom - top);
  const parts = [0, 0.5, 1].flatMap((part) => [
    make("line", { class: "grid", x1: left, x2: width, y1: y(part * high), y2: y(part * high) }),
    make("text", { x: left - 8, y: y(part * high) + 4, "text-anchor": "end" }, number(part * high)),
  ]);
  const tick = values.length > 150 ? 60 : values.length > 75 ? 30 : 15;
  for (let back = 0; back < values.length - tick / 4; back += tick) {
    const label = back === 0 ? "now" : tick === 60 ? `−${back / 60} min` : `−${back} s`;
    parts.push(make("text", { x: x(values.length - 1 - back), y: height - 3, "text-anchor": back ? "middle" : "end" }, label));
  }
  for (const h of s.history) {
    const i = h.time - start;
    if (i >= 0 && i < values.length) parts.push(make("line", { class: "mark", x1: x(i), x2: x(i), y1: top, y2: bottom }));
  }
  parts.push(...draw(values, x, y, bottom));
  const reading = $(id.replace("plot", "reading"));
  reading.textContent = "";
  if (hover !== null) {
    const i = Math.max(0, Math.min(values.length - 1, Math.round((hover - left) / step)));
    parts.push(make("line", { class: "hair", x1: x(i), x2: x(i), y1: top, y2: bottom }));
    reading.textContent = `${clock(start + i)}: ${number(values[i])} ${unit}`;
  }
  svg.replaceChildren(...parts);
}

function plots(s) {
  const { tokens, stall_ms: stalls } = s.plot;
  plot("tokens-plot", s, tokens, (shown, x, y, bottom) => {
    const line = shown.map((v, i) => (i ? "L" : "M") + x(i).toFixed(1) + " " + y(v).toFixed(1)).join("");
    return [make("path", { class: "area", d: `${line}L${x(shown.length - 1)} ${bottom}L${x(0)} ${bottom}Z` }), make("path", { class: "line", d: line })];
  }, "tokens/s");
  plot("stall-plot", s, stalls, (shown, x, y, bottom) => shown.flatMap((v, i) => (v > 0 ? [
    make("line", { class: "stem", x1: x(i), x2: x(i), y1: bottom, y2: y(v) }), make("circle", { class: "dot", cx: x(i), cy: y(v), r: 2.5 }),
  ] : [])), "ms");
}

function show(s) {
  shown = s;
  for (const section of [head, tiles, replicas, versions, adapters, troubles, plots]) section(s);
}

// The connection. fetch and not EventSource, which cannot send a token

const headers = (more = {}) => (token ? { authorization: "Bearer " + token, ...more } : more);

async function follow() {
  for (;;) {
    try {
      const reply = await fetch("ui/events", { headers: headers(), cache: "no-store" });
      if (reply.status === 401 || reply.status === 403) {
        state("token needed", "warn");
        await ask("This service shows its state to those who have its data token.");
        continue;
      }
      if (!reply.ok) throw new Error("HTTP " + reply.status);
      const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let rest = ""; ;) {
        const { done, value } = await reader.read();
        if (done) break;
        const events = (rest + value).split("\n\n");
        rest = events.pop();
        for (let i = events.length; i-- > 0;) if (!events[i].startsWith("data: ")) events.splice(i, 1); // comments
        if (events.length) {
          last = Date.now();
          document.body.classList.remove("stale");
          show(JSON.parse(events.at(-1).slice("data: ".length)));
        }
      }
    } catch (error) {
      console.warn(error);
    }
    await new Promise((resolve) => setTimeout(resolve, 1500));
  }
}

setInterval(() => {
  if (!last || Date.now() - last < STALE_MS) return;
  document.body.classList.add("stale");
  state("no answer for " + lasting(Math.round((Date.now() - last) / 1000)), "bad");
}, 1000);

function ask(why) {
  const dialog = $("ask");
  if (why) $("ask-why").textContent = why + " Kept in this tab only.";
  $("token").value = "";
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => {
    if (dialog.returnValue === "ok") {
      token = $("token").value.trim();
      sessionStorage.setItem("token", token);
    }
    resolve(dialog.returnValue === "ok");
  }, { once: true }));
}

let forget = 0; // timer: a refusal is shown for a while, or until the next attempt

async function control(verb, body) {
  clearTimeout(forget);
  const send = () => fetch("v1/rollout/" + verb, { method: "POST", headers: headers({ "content-type": "application/json" }), body: JSON.stringify(body) });
  let reply = await send();
  while ((reply.status === 401 || reply.status === 403) && (await ask("This needs the admin token."))) reply = await send();
  $("notice").hidden = reply.ok;
  if (!reply.ok) forget = setTimeout(() => { $("notice").hidden = true; }, REFUSAL_MS);
  if (!reply.ok) $("notice").textContent = `${verb}: ` + ((await reply.json().catch(() => null))?.error?.message ?? "HTTP " + reply.status);
}

$("pause").addEventListener("click", () => control("pause", { mode: $("mode").value }));
$("resume").addEventListener("click", () => control("resume", {}));
$("token-button").addEventListener("click", () => ask());
for (const id of ["tokens-plot", "stall-plot"]) {
  $(id).addEventListener("pointermove", (event) => { hover = event.offsetX; if (shown) plots(shown); });
  $(id).addEventListener("pointerleave", () => { hover = null; if (shown) plots(shown); });
}
addEventListener("resize", () => shown && plots(shown));
follow();
