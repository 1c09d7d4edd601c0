// The page of a coordinator. Texts from jobs and groups only ever become text nodes.

const STATES = {member: "takes part", healing: "heals", stale: "waits for donors", ready: "stands by", present: "compiles", leaving: "leaves", left: "has left", gone: "gone"};
// What an event says of the state that its group is in from then on.
const BECOMES = {group_present: "present", group_joined: "stale", group_stale: "stale", heal_began: "healing", group_ready: "ready", group_leaves: "leaving",
  group_lost: "gone", group_evicted: "gone", group_set_aside: "gone", group_left: "left", group_refused: "gone"};
const LOST = {PROGRAM_STARTUP: "starting up", INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION: "no quorum", WASTED_PROGRESS_FROM_DISRUPTION: "retried steps", OTHER: "outside of steps"};
const ACTIONS = {
  drain: {label: "Drain", effect: "The group finishes its step, hands its place to a spare or its shards to the others, and its process ends with status 0."},
  evict: {label: "Evict", effect: "The group's process ends with an error, and the job goes on without it. It joins again when it is restarted."},
  pause: {label: "Pause", effect: "All groups keep their states and wait after the current step, until the job is resumed."},
  resume: {label: "Resume", effect: "The job goes on with its next step."},
};
// Events that need a look, and those that only follow from others; the rest is between them.
const HEAVY = new Set(["group_lost", "group_evicted", "group_refused", "group_set_aside", "job_halted", "job_waiting", "quorum_ended", "step_retried"]);
const LIGHT = new Set(["group_present", "group_joined", "group_stale", "group_ready", "heal_began", "quorum_changed"]);
const MAX_EVENTS = 200;
// More rows than these are seen together in an overview, one square each.
const FEW_GROUPS = 30;
const SVG = "http://www.w3.org/2000/svg";
const $ = id => document.getElementById(id);

// Seconds by which the coordinator's clock is ahead of the browser's.
let ahead = 0;
let elsewhere = "", chosen = "", job = null, actions = false, source = null, lines = new Map(), rows = new Map(), points = [], lastSeq = 0;

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value; else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

const setText = (element, text) => { if (element.textContent !== text) element.textContent = text; };

function duration(seconds) {
  if (seconds > 0 && seconds < 1) return `${seconds < .01 ? (1000 * seconds).toFixed(1) : Math.round(1000 * seconds)} ms`;
  if (seconds < 10 && !Number.isInteger(seconds)) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

const percent = part => part === null ? "none yet" : `${(100 * part).toFixed(1)} %`;
const clock = unix => new Date(unix * 1000).toLocaleTimeString([], {hour12: false});
const byName = new Intl.Collator("en", {numeric: true}).compare;

// ---- which job ----

// The job that the address names; none if a hand has written what no name is written as.
function named() {
  try {
    return location.hash.startsWith("#job=") ? decodeURIComponent(location.hash.slice(5)) : "";
  } catch {
    return "";
  }
}

function choose() {
  const wanted = named();
  if (wanted && wanted !== chosen) open(wanted);
}

async function loadJobs() {
  const answer = await fetch("api/v1/jobs");
  const {jobs} = await answer.json();
  const list = $("jobs");
  list.replaceChildren(...jobs.map(each => {
    const link = make("a", {href: `#job=${encodeURIComponent(each.job)}`}, `${each.job} · ${each.state}`);
    if (each.job === chosen) link.setAttribute("aria-current", "page");
    return make("li", {}, link);
  }));
  $("empty").hidden = jobs.length > 0;
  if (!chosen && jobs.length && !named()) {
    const live = jobs.find(each => each.state !== "idle" && each.state !== "finished") ?? jobs[0];
    open(live.job);
  }
}

function whoLeads(told) {
  if (told.role === "leader") return "";
  if (told.leader) return `This coordinator stands by, and ${told.leader} leads: the page of that one shows its jobs.`;
  return "This coordinator does not lead yet, and knows of no other that does: its log says what it waits for.";
}

async function about() {
  const told = await (await fetch("api/v1/coordinator")).json();
  actions = told.actions;
  ahead = told.time - Date.now() / 1000;
  elsewhere = whoLeads(told);
  setText($("empty"), elsewhere || "No job yet. It appears here when its first group connects.");
  setText($("about"), `${told.role}${told.leader && told.role !== "leader" ? `; ${told.leader} leads` : ""} · term ${told.term} · ${told.groups} groups · version ${told.version}`);
}

async function open(name) {
  chosen = name;
  source?.close();
  lines = new Map(); rows = new Map(); points = []; job = null; lastSeq = 0;
  $("groups").replaceChildren(); $("events").replaceChildren();
  const stream = source = new EventSource(`api/v1/events?job=${encodeURIComponent(name)}`);
  const early = [];
  let loaded = false, missing = false;
  stream.addEventListener("event", message => {
    const event = {seq: Number(message.lastEventId), ...JSON.parse(message.data)};
    if (loaded) take(event); else early.push(event);
  });
  // Also after the connection was lost: what happened meanwhile is in the history.
  const load = async () => {
    loaded = false;
    try {
      const answer = await fetch(`api/v1/jobs/${name.split("/").map(encodeURIComponent).join("/")}`);
      if (stream !== source) return;
      missing = !answer.ok;
      lastSeq = 0;  // another life of the coordinator counts its events from 1
      if (missing) {
        await about();
        setText($("banner"), elsewhere || "The coordinator does not know this job any more.");
      } else {
        const whole = await answer.json();
        lines = new Map(); points = [];
        $("events").replaceChildren();
        whole.events.forEach(event => take(event));
        points = whole.points.slice(0, -1);
        keepPoint(whole);
        show(whole);
      }
    } finally {
      loaded = true;
    }
    early.splice(0).forEach(take);
    loadJobs();
  };
  stream.addEventListener("state", message => {
    if (!loaded || stream !== source) return;
    const told = JSON.parse(message.data);
    if (told) showSoon(told);
    if ((told === null) !== missing) load();
  });
  stream.onopen = () => {
    setText($("link"), "live");
    return load();
  };
  stream.onerror = () => setText($("link"), "not connected; trying again");
}

// ---- events ----

function take(event) {
  if (event.seq <= lastSeq) return;
  lastSeq = event.seq;
  if (event.event === "leads" || event.event === "stands_by") about();
  if (event.group && BECOMES[event.event]) extend(event.group, BECOMES[event.event], event.t, event.reason);
  const quorum = event.event === "quorum_changed";
  if (quorum) (event.joined ?? []).forEach(name => extend(name, "member", event.t, ""));
  const list = $("events");
  const weight = HEAVY.has(event.event) ? "heavy" : LIGHT.has(event.event) ? "light" : "";
  list.prepend(make("li", {class: weight}, make("time", {datetime: new Date(event.t * 1000).toISOString()}, clock(event.t)), said(event)));
  while (list.childElementCount > MAX_EVENTS) list.lastElementChild.remove();
}

// A few of many names or texts.
const some = found => found.slice(0, 8).join(", ") + (found.length > 8 ? ` and ${found.length >= 50 ? "more" : `${found.length - 8} more`}` : "");

function said(event) {
  const who = event.group ?? "", why = event.reason ? `: ${event.reason}` : "";
  switch (event.event) {
    case "quorum_changed": {
      const left = some((event.left ?? []).map(each => `${each.group} (${each.reason})`));
      const joined = some(event.joined ?? []);
      return `quorum ${event.quorum_id} from step ${event.step}: ${event.members} members${joined ? `; joined ${joined}` : ""}${left ? `; without ${left}` : ""}`;
    }
    case "quorum_ended": return `quorum ${event.quorum_id} ended at step ${event.step} without a successor${why}`;
    case "step_retried": return `step ${event.step} is retried${why}`;
    case "heal_began": return `${who} heals to step ${event.step} from ${some(event.donors ?? [])}`;
    case "operator_action": return `an operator asked to ${event.action} ${who || "the job"}${why} (token of the ${event.by}, status ${event.status})`;
    case "job_founded": return "the job begins at step 0";
    case "job_resumed": return `the job goes on from step ${event.step}`;
    case "job_finished": return `the job has finished at step ${event.step}`;
    case "job_waiting": return `the job waits${why}`;
    case "job_halted": return `the job is halted${why}`;
    default: return `${who ? `${who} ` : ""}${event.event.replace(/^group_/, "").replaceAll("_", " ")}${why}`;
  }
}

// An event can overtake the state before it, which is shown later: each piece goes to its place in time.
function extend(group, state, t, reason) {
  const line = lines.get(group) ?? [];
  const place = line.findLastIndex(piece => piece.t <= t) + 1;
  if (line[place - 1]?.state === state) return;
  line.splice(place, 0, {state, t, reason: reason ?? ""});
  if (line.length > 200) line.shift();
  lines.set(group, line);
}

// ---- the job ----

// A slow computer shows fewer of the states that come, and never an old one while newer ones wait.
let newest = null;

function showSoon(told) {
  keepPoint(told);
  if (!newest) {
    setTimeout(() => {
      const {stream, told} = newest;
      newest = null;
      if (stream === source) show(told);
    });
  }
  newest = {stream: source, told};
}

function keepPoint(told) {
  const point = told.points?.at(-1);
  if (point && point.t !== points.at(-1)?.t) points.push(point);
  if (points.length > 600) points.shift();
}

function show(next) {
  job = next;
  $("job").hidden = false; $("empty").hidden = true;
  setText($("job-name"), job.job);
  document.title = `${job.job} · ${job.state} · jaxft`;
  const hold = $("hold"), action = job.paused ? "resume" : "pause";
  hold.hidden = !actions; hold.dataset.action = action;
  setText(hold, ACTIONS[action].label);
  const bad = job.state === "halted";
  $("banner").classList.toggle("bad", bad);
  setText($("banner"), bad ? `Halted: ${job.halted}` : job.waiting ? `Waiting: ${job.waiting}` : "");
  pairs($("facts"), [
    ["State", job.state], ["Step", String(job.step ?? "none")], ["Quorum", `${job.quorum_id}, ${job.members} of ${job.places} places`],
    ["Goodput", percent(job.goodput)],
    ["Retried", String(Object.values(job.steps_retried).reduce((a, b) => a + b, 0))],
    ["Groups", Object.entries(job.groups).map(([state, count]) => `${count} ${state}`).join(", ")],
  ]);
  pairs($("lost"), Object.entries(job.badput_seconds).map(([cause, seconds]) => [LOST[cause] ?? cause, duration(seconds)]));
  curve($("rate"), points.map(each => [each.t, each.steps_per_s]));
  setText($("rate-now"), job.steps_per_s.toFixed(job.steps_per_s < 10 ? 2 : 0));
  const name = Object.keys(job.values)[0] ?? $("value-name").textContent;
  $("value-figure").hidden = !name;
  if (name) {
    const known = points.filter(each => name in each);
    setText($("value-name"), name);
    setText($("value-now"), known.length ? known.at(-1)[name].toPrecision(4) : "");
    curve($("value"), known.map(each => [each.t, each[name]]), true);
  }
  table();
}

function pairs(list, found) {
  if (list.childElementCount !== found.length) {
    list.replaceChildren(...found.map(() => make("div", {}, make("dt"), make("dd"))));
  }
  found.forEach(([name, value], place) => {
    setText(list.children[place].children[0], name);
    setText(list.children[place].children[1], value);
  });
}

function curve(svg, found, fit = false) {
  let line = svg.firstElementChild;
  if (!line) svg.append(line = document.createElementNS(SVG, "polyline"));
  if (found.length < 2) { line.setAttribute("points", ""); return; }
  const values = found.map(([, value]) => value), first = found[0][0], last = found.at(-1)[0];
  const low = fit ? Math.min(...values) : 0, high = Math.max(...values);
  // A loss falls by orders of magnitude: on a linear axis all of it but the beginning would be flat.
  const logarithmic = fit && low > 0 && high > 10 * low;
  const at = value => logarithmic ? Math.log(value) : value, range = at(high) - at(low) || 1;
  line.setAttribute("points", found.map(([t, value]) =>
    `${(600 * (t - first) / (last - first || 1)).toFixed(1)},${(76 - 72 * (at(value) - at(low)) / range).toFixed(1)}`).join(" "));
  const [top, bottom, begin] = svg.closest("figure").querySelectorAll(".axis");
  setText(top, `${high.toPrecision(3)}${logarithmic ? " (log scale)" : ""}`);
  setText(bottom, low.toPrecision(3)); setText(begin, `${duration(Math.round(last - first))} ago`);
}

// ---- groups ----

function table() {
  const filter = $("filter").value.toLowerCase(), span = Number($("span").value), now = Date.now() / 1000 + ahead;
  for (const head of document.querySelectorAll("thead .acts")) head.hidden = !actions;
  setText($("ago"), `${$("span").selectedOptions[0].textContent} ago`);
  const groups = job.group_list.map(each => each.ended ? {...each, state: "left"} : each).sort((a, b) => byName(a.group, b.group));
  overview(groups);
  const known = new Set(groups.map(each => each.group));
  for (const [name, row] of rows) if (!known.has(name)) { row.element.remove(); rows.delete(name); }
  const ordered = groups.map(group => {
    extend(group.group, group.state, group.since, group.reason);
    let row = rows.get(group.group);
    if (!row) rows.set(group.group, row = newRow(group.group));
    row.element.hidden = !`${group.group} ${group.state}`.toLowerCase().includes(filter);
    fill(row, group, span, now);
    return row.element;
  });
  const body = $("groups");
  if (ordered.some((element, place) => body.children[place] !== element)) body.replaceChildren(...ordered);
}

function overview(groups) {
  const box = $("overview");
  box.hidden = groups.length <= FEW_GROUPS;
  if (box.hidden) return;
  while (box.childElementCount > groups.length) box.lastElementChild.remove();
  while (box.childElementCount < groups.length) box.append(make("i"));
  const counts = new Map();
  groups.forEach((group, place) => {
    const square = box.children[place];
    square.className = `s-${group.state}`; square.title = `${group.group}: ${STATES[group.state] ?? group.state}`;
    counts.set(group.state, (counts.get(group.state) ?? 0) + 1);
  });
  box.setAttribute("aria-label", `${groups.length} groups: ${[...counts].map(([state, count]) => `${count} ${STATES[state] ?? state}`).join(", ")}`);
}

function newRow(name) {
  const dot = make("span", {class: "dot"}), state = make("span"), why = make("div", {class: "why"});
  const step = make("td"), times = make("td"), losses = make("td"), goodput = make("td"), line = document.createElementNS(SVG, "svg");
  line.setAttribute("viewBox", "0 0 1000 14"); line.setAttribute("preserveAspectRatio", "none"); line.setAttribute("role", "img");
  const act = make("td", {class: "acts"}), buttons = ["drain", "evict"].map(action => {
    const button = make("button", {type: "button", "aria-label": `${ACTIONS[action].label} ${name}`}, action);
    button.addEventListener("click", () => confirmAction(action, name));
    return button;
  });
  act.append(...buttons);
  const element = make("tr", {}, make("th", {scope: "row"}, name), make("td", {}, dot, state, why), step, times, losses, goodput, make("td", {class: "line"}, line), act);
  return {element, dot, state, why, step, times, losses, goodput, line, act, buttons};
}

function fill(row, group, span, now) {
  row.dot.className = `dot s-${group.state}`;
  const extra = [group.spare ? "spare" : "", group.away ? "away" : "", group.draining ? "to end" : ""].filter(Boolean).join(", ");
  setText(row.state, `${STATES[group.state] ?? group.state}${extra ? ` (${extra})` : ""} for ${duration(Math.max(0, Math.round(now - group.since)))}`);
  setText(row.why, group.reason ?? "");
  setText(row.step, group.step === undefined ? "" : String(group.step));
  setText(row.times, group.compute_s === undefined ? "" : `${duration(group.compute_s)}, ${duration(group.exchange_s)}`);
  setText(row.losses, String(group.losses));
  // Nothing is lost to a spare that stands by.
  setText(row.goodput, group.spare && group.state !== "member" ? "" : percent(group.goodput));
  row.act.hidden = !actions; row.buttons.forEach(button => { button.disabled = group.state === "gone" || group.state === "left"; });
  const line = lines.get(group.group) ?? [], from = now - span, parts = [];
  line.forEach((piece, place) => {
    const until = line[place + 1]?.t ?? now;
    if (until <= from) return;
    const x = 1000 * (Math.max(piece.t, from) - from) / span, width = Math.max(1.5, 1000 * (until - Math.max(piece.t, from)) / span);
    const rect = document.createElementNS(SVG, "rect"), title = document.createElementNS(SVG, "title");
    rect.setAttribute("class", `s-${piece.state}`); rect.setAttribute("x", x.toFixed(1)); rect.setAttribute("width", width.toFixed(1)); rect.setAttribute("height", "14");
    title.textContent = `${clock(piece.t)}: ${STATES[piece.state]}${piece.reason ? `: ${piece.reason}` : ""}`;
    rect.append(title); parts.push(rect);
  });
  row.line.setAttribute("aria-label", `${group.group}: ${line.slice(-4).map(piece => `${STATES[piece.state]} since ${clock(piece.t)}`).join(", ")}`);
  row.line.replaceChildren(...parts);
}

// ---- actions ----

function confirmAction(action, name) {
  const dialog = $("confirm"), {label, effect} = ACTIONS[action];
  setText($("confirm-title"), `${label} ${name || chosen}?`);
  setText($("confirm-text"), effect);
  setText($("do"), label);
  setText($("outcome"), ""); $("reason").value = "";
  dialog.dataset.group = name; dialog.dataset.action = action;
  dialog.showModal();
}

$("hold").addEventListener("click", () => confirmAction($("hold").dataset.action, ""));

$("do").addEventListener("click", async click => {
  click.preventDefault();
  const dialog = $("confirm");
  let told = {ok: false, text: "The coordinator did not answer, and may have done it all the same: look at the job before you try again."};
  try {
    const answer = await fetch("api/v1/actions", {
      method: "POST", headers: {"Content-Type": "application/json", Authorization: `Bearer ${$("token").value}`},
      body: JSON.stringify({action: dialog.dataset.action, job: chosen, group: dialog.dataset.group, reason: $("reason").value}),
    });
    told = await answer.json();
  } catch { // it says so
  }
  if (told.ok) dialog.close(); else setText($("outcome"), told.text);
});

// ---- start ----

$("legend").append(...["member", "healing", "ready", "present", "left", "gone"].map(state => make("span", {}, make("i", {class: `s-${state}`}), STATES[state])));
$("filter").addEventListener("input", () => job && table());
$("span").addEventListener("change", () => job && table());
addEventListener("hashchange", choose);
const refresh = () => Promise.all([about(), loadJobs()]).catch(() => setText($("link"), "not connected; trying again"));
choose();
refresh();
setInterval(refresh, 5000);
