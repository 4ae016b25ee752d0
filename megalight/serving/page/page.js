// The page: conversations with the model, kept in this browser. What a model writes is only ever text: the renderer
// makes nodes and sets their text, and no string becomes HTML, a style or a script.
"use strict";

const $ = (id) => document.getElementById(id);
const KEPT = "megalight.conversations";
const SETTINGS = "megalight.settings";
const FIELDS = ["system", "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "probabilities", "theme"];

function make(name, properties = {}, ...children) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
}

// ---- Markdown, as nodes ----

const INLINE =
  /(`+)([\s\S]*?[^`])\1(?!`)|\*\*(?=\S)([\s\S]*?\S)\*\*|~~(?=\S)([\s\S]*?\S)~~|(?<![\w*])\*(?=[^\s*])([\s\S]*?[^\s*])\*(?!\*)|(?<!\w)_(?=[^\s_])([\s\S]*?[^\s_])_(?!\w)|\[([^\[\]\n]+)\]\(([^()\s]+)\)|(https?:\/\/[^\s<>()"'`]*[^\s<>()"'`.,;:!?])/;
const LONGEST_INLINE = 20000; // Longer paragraphs stay plain: what stands for emphasis in them is chance.

function inline(text, depth = 0) {
  const nodes = [];
  while (text) {
    const match = depth < 8 && text.length < LONGEST_INLINE ? INLINE.exec(text) : null;
    if (!match) break;
    if (match.index) nodes.push(text.slice(0, match.index));
    const [whole, , code, strong, gone, star, underscore, label, target, url] = match;
    if (code !== undefined) nodes.push(make("code", { textContent: code.replace(/^ (.*) $/s, "$1") }));
    else if (strong !== undefined) nodes.push(make("strong", {}, ...inline(strong, depth + 1)));
    else if (gone !== undefined) nodes.push(make("del", {}, ...inline(gone, depth + 1)));
    else if ((star ?? underscore) !== undefined) nodes.push(make("em", {}, ...inline(star ?? underscore, depth + 1)));
    else nodes.push(link(label ?? url, target ?? url) ?? whole);
    text = text.slice(match.index + whole.length);
  }
  if (text) nodes.push(text);
  return nodes;
}

function link(label, target) {
  // Of what a model names, a browser may open pages alone, and only when the reader asks.
  if (!/^https?:\/\//i.test(target)) return null;
  return make("a", { href: target, target: "_blank", rel: "noopener noreferrer", textContent: label });
}

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)]) +(.*)$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const DIVIDER = /^ *\|?[ :]*-[-| :]*$/;

// The blocks of a text: what kind, and its lines. Each block's text is a piece of the whole.
function blocks(text) {
  const lines = text.split("\n");
  const found = [];
  for (let at = 0; at < lines.length; ) {
    const begin = at;
    const line = lines[at];
    const fence = FENCE.exec(line);
    let kind = "paragraph";
    if (!line.trim()) {
      at += 1;
      continue;
    } else if (fence) {
      kind = "code";
      at += 1;
      while (at < lines.length && !(lines[at].trim().startsWith(fence[1]) && !lines[at].trim().slice(fence[1].length).trim())) at += 1;
      at += 1;
    } else if (/^ {0,3}#{1,6} /.test(line)) {
      kind = "heading";
      at += 1;
    } else if (RULE.test(line)) {
      kind = "rule";
      at += 1;
    } else if (/^ {0,3}>/.test(line)) {
      kind = "quote";
      while (at < lines.length && /^ {0,3}>/.test(lines[at])) at += 1;
    } else if (ITEM.test(line)) {
      kind = "list";
      while (at < lines.length && (ITEM.test(lines[at]) || /^ {2,}\S/.test(lines[at]) || (!lines[at].trim() && /^ *([-*+]|\d{1,9}[.)]) |^ {2,}\S/.test(lines[at + 1] ?? "")))) at += 1;
    } else if (line.includes("|") && DIVIDER.test(lines[at + 1] ?? "") && (lines[at + 1] ?? "").includes("|")) {
      kind = "table";
      while (at < lines.length && lines[at].includes("|")) at += 1;
    } else {
      while (at < lines.length && lines[at].trim() && !(at > begin && (FENCE.test(lines[at]) || /^ {0,3}(#{1,6} |>)/.test(lines[at]) || ITEM.test(lines[at])))) at += 1;
    }
    found.push({ kind, lines: lines.slice(begin, at) });
  }
  return found;
}

function rendered({ kind, lines }, depth = 0) {
  if (kind === "code") {
    const open = FENCE.exec(lines[0])[1];
    const closed = lines.length > 1 && lines.at(-1).trim().startsWith(open);
    const code = make("code", { textContent: lines.slice(1, closed ? -1 : undefined).join("\n") });
    return make("pre", { tabIndex: 0 }, code);
  }
  if (kind === "heading") {
    const [, marks, title] = /^ {0,3}(#{1,6}) +(.*?)[ #]*$/.exec(lines[0]);
    return make(`h${Math.min(6, marks.length + 2)}`, {}, ...inline(title));
  }
  if (kind === "rule") return make("hr");
  if (kind === "quote" && depth < 8) {
    return make("blockquote", {}, ...nodes(lines.map((line) => line.replace(/^ {0,3}> ?/, "")).join("\n"), depth + 1));
  }
  if (kind === "list" && depth < 8) return list(lines, depth);
  if (kind === "table") return table(lines);
  const paragraph = make("p", { className: "plain" });
  paragraph.append(...inline(lines.join("\n")));
  return paragraph;
}

function list(lines, depth) {
  const [, indent, mark] = ITEM.exec(lines[0]);
  const ordered = /\d/.test(mark);
  const node = make(ordered ? "ol" : "ul", ordered ? { start: parseInt(mark, 10) } : {});
  let item = [];
  const close = () => {
    if (!item.length) return;
    const [first, ...rest] = item;
    const inner = rest.map((line) => line.slice(Math.min(indent.length + mark.length + 1, line.search(/\S|$/))));
    node.append(make("li", {}, ...inline(first), ...nodes(inner.join("\n"), depth + 1)));
  };
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && found[1].length <= indent.length) {
      close();
      item = [found[3]];
    } else item.push(line);
  }
  close();
  return node;
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const row = (line, kind) => make("tr", {}, ...cells(line).map((cell) => make(kind, {}, ...inline(cell))));
  const body = make("tbody", {}, ...lines.slice(2).map((line) => row(line, "td")));
  return make("div", { className: "scroll", tabIndex: 0 }, make("table", {}, make("thead", {}, row(lines[0], "th")), body));
}

const nodes = (text, depth = 0) => blocks(text).map((block) => rendered(block, depth));

// Show a text that grows: blocks that are as before keep their nodes.
function show(node, text) {
  const found = blocks(text);
  const sources = found.map((block) => block.kind + "\n" + block.lines.join("\n"));
  const before = node.sources ?? [];
  let same = 0;
  while (same < before.length && before[same] === sources[same]) same += 1;
  while (node.childNodes.length > same) node.lastChild.remove();
  node.append(...found.slice(same).map((block) => rendered(block)));
  node.sources = sources;
}

// ---- What is kept ----

function read(storage, name, otherwise) {
  try {
    return JSON.parse(storage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

const settings = { probabilities: true, ...read(localStorage, SETTINGS, {}) };
let conversations = stored();
const deleted = new Set();
let current = conversations[0] ?? begin();
let model = null;
let running = null; // The AbortController of the answer that comes.

function stored() {
  const found = read(localStorage, KEPT, []);
  return Array.isArray(found) ? found.filter((each) => Array.isArray(each?.messages)) : [];
}

function begin() {
  const made = { id: crypto.randomUUID?.() ?? String(Date.now() + Math.random()), messages: [] };
  conversations.unshift(made);
  return made;
}

function keep() {
  // Another tab may have kept others meanwhile.
  const known = new Set(conversations.map((each) => each.id));
  const others = stored().filter((each) => !known.has(each.id) && !deleted.has(each.id));
  const kept = [...conversations.filter((each) => each.messages.length), ...others];
  // Probabilities are large, and are asked again with another answer.
  const plain = (name, value) => (name === "tokens" ? undefined : value);
  try {
    localStorage.setItem(KEPT, JSON.stringify(kept, plain));
  } catch {
    tell("This browser has no room for more conversations: the newest parts are lost when the page closes. Delete some.");
  }
}

function title(conversation) {
  const first = conversation.messages.find((message) => message.role === "user");
  return first ? first.content.trim().slice(0, 40) || "…" : "New conversation";
}

// ---- The page ----

function tell(text) {
  $("status").textContent = text;
  $("status").hidden = !text;
}

function draw() {
  $("conversations").replaceChildren(
    ...conversations.map((each) => make("option", { value: each.id, textContent: title(each), selected: each === current })),
  );
  $("messages").replaceChildren(...current.messages.map(article));
  $("messages").scrollTop = $("messages").scrollHeight;
}

function article(message, place) {
  const node = make("article", { className: message.role });
  node.append(make("h2", { textContent: message.role === "user" ? "You" : "Answer" }));
  if (message.role === "user") {
    node.append(make("div", { className: "plain", textContent: message.content }));
    const edit = make("button", { type: "button", textContent: "Edit" });
    edit.addEventListener("click", () => editing(node, message, place));
    node.append(make("div", { className: "actions" }, edit));
    return node;
  }
  const thoughts = make("div", { className: "plain" });
  node.thoughts = make("details", {}, make("summary", { textContent: "Reasoning" }), thoughts);
  node.content = make("div");
  node.error = make("p", { className: "error" });
  node.actions = make("div", { className: "actions" });
  node.append(node.thoughts, node.content, node.error, node.actions);
  node.update = () => {
    node.thoughts.hidden = !message.reasoning;
    thoughts.textContent = message.reasoning ?? "";
    show(node.content, message.content);
    node.error.textContent = message.error ?? "";
    node.error.hidden = !message.error;
  };
  node.finish = () => {
    const button = (textContent, act) => {
      const made = make("button", { type: "button", textContent });
      made.addEventListener("click", () => act(made));
      return made;
    };
    node.actions.replaceChildren(
      button("Try again", () => ask(place)),
      button("Copy", () => navigator.clipboard?.writeText(message.content)),
    );
    if (message.tokens?.length) {
      const tokens = tokensOf(message.tokens);
      tokens.hidden = true;
      node.content.after(tokens);
      const toggle = button("Tokens", () => {
        tokens.hidden = !tokens.hidden;
        node.content.hidden = !tokens.hidden;
        toggle.setAttribute("aria-pressed", String(!tokens.hidden));
      });
      toggle.setAttribute("aria-pressed", "false");
      node.actions.append(toggle);
    }
    if (message.usage) node.actions.append(`${message.usage} tokens`);
    if (message.reason === "length") node.actions.append("cut off at its limit");
    if (message.reason === "stopped") node.actions.append("stopped");
  };
  node.update();
  node.finish();
  return node;
}

function tokensOf(tokens) {
  const box = make("div", { className: "tokens" });
  for (const { token, logprob, top_logprobs: others } of tokens) {
    const share = Math.exp(logprob);
    const shade = share > 0.9 ? "" : share > 0.5 ? " p1" : share > 0.2 ? " p2" : share > 0.05 ? " p3" : " p4";
    const span = make("span", { className: `token${shade}`, textContent: token, tabIndex: box.childNodes.length ? -1 : 0 });
    const lines = (others.length ? others : [{ token, logprob }]).map((each) => {
      const percent = (100 * Math.exp(each.logprob)).toFixed(1).padStart(5);
      return `${each.token === token ? "›" : " "} ${percent} %  ${JSON.stringify(each.token).slice(0, 30)}`;
    });
    if (!others.some((each) => each.token === token) && others.length) {
      lines.push(`› ${(100 * share).toFixed(1).padStart(5)} %  ${JSON.stringify(token).slice(0, 30)}`);
    }
    span.alternatives = lines.join("\n");
    box.append(span);
  }
  const reveal = (event) => {
    const box = $("alternatives");
    const text = event.target.alternatives;
    box.hidden = !text;
    if (!text) return;
    box.textContent = text;
    const place = event.target.getBoundingClientRect();
    const left = Math.max(4, Math.min(place.left, innerWidth - box.offsetWidth - 4));
    const below = place.bottom + 6 + box.offsetHeight < innerHeight;
    box.style.left = `${left}px`;
    box.style.top = `${below ? place.bottom + 6 : Math.max(4, place.top - box.offsetHeight - 6)}px`;
  };
  const conceal = () => ($("alternatives").hidden = true);
  box.addEventListener("mouseover", reveal);
  box.addEventListener("focusin", reveal);
  box.addEventListener("mouseout", conceal);
  box.addEventListener("focusout", conceal);
  box.addEventListener("keydown", (event) => {
    const next = { ArrowRight: "nextSibling", ArrowLeft: "previousSibling" }[event.key];
    const target = next && event.target[next];
    if (!target) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    target.tabIndex = 0;
    target.focus();
  });
  return box;
}

function editing(node, message, place) {
  const field = make("textarea", { value: message.content, rows: Math.min(12, message.content.split("\n").length + 1) });
  field.setAttribute("aria-label", "Edit the message");
  const send = make("button", { type: "button", textContent: "Send" });
  const cancel = make("button", { type: "button", textContent: "Cancel" });
  const close = () => node.replaceWith(article(message, place));
  send.addEventListener("click", () => {
    if (!field.value.trim()) return;
    message.content = field.value;
    ask(place + 1);
  });
  cancel.addEventListener("click", close);
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
    if (sends(event)) send.click();
  });
  node.replaceChildren(node.firstChild, field, make("div", { className: "actions" }, send, cancel));
  field.focus();
}

const sends = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing;

// ---- Answers ----

function headers() {
  const key = sessionStorage.getItem("megalight.key");
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

function body(messages) {
  const found = { model, messages, stream: true, stream_options: { include_usage: true } };
  if (settings.system?.trim()) found.messages = [{ role: "system", content: settings.system }, ...messages];
  for (const name of ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"]) {
    const value = parseFloat(settings[name]);
    if (Number.isFinite(value)) found[name] = value;
  }
  if (settings.probabilities) Object.assign(found, { logprobs: true, top_logprobs: 5 });
  return found;
}

async function* events(response) {
  const decoder = new TextDecoderStream();
  const reader = response.body.pipeThrough(decoder).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
  }
}

class Told extends Error {}

// Ask for the message at a place; what stands there and after it goes.
async function ask(place) {
  running?.abort();
  const control = (running = new AbortController());
  const conversation = current;
  conversation.messages.length = place;
  const said = conversation.messages.map(({ role, content }) => ({ role, content }));
  const message = { role: "assistant", content: "", tokens: [] };
  conversation.messages.push(message);
  draw();
  const node = $("messages").lastChild;
  node.setAttribute("aria-busy", "true");
  node.actions.replaceChildren("…");
  $("send").hidden = true;
  $("stop").hidden = false;
  let ended = false;
  let drawn = 0;
  const update = () => {
    if (conversation !== current) return;
    const box = $("messages");
    const low = box.scrollHeight - box.scrollTop - box.clientHeight < 80;
    node.update();
    if (low) box.scrollTop = box.scrollHeight;
    drawn = performance.now();
  };
  try {
    if (!model) await connect();
    const options = { method: "POST", headers: headers(), body: JSON.stringify(body(said)), signal: control.signal };
    const response = await fetch("v1/chat/completions", options);
    if (!response.ok) {
      const told = await response.json().catch(() => null);
      if (response.status === 401) openSettings();
      throw new Told(told?.error?.message ?? `The server answers ${response.status}.`);
    }
    for await (const event of events(response)) {
      if (event.error) throw new Told(event.error.message);
      if (event.usage) message.usage = event.usage.completion_tokens;
      for (const choice of event.choices) {
        message.content += choice.delta.content ?? "";
        if (choice.delta.reasoning_content) message.reasoning = (message.reasoning ?? "") + choice.delta.reasoning_content;
        message.tokens.push(...(choice.logprobs?.content ?? []));
        if (choice.finish_reason) [message.reason, ended] = [choice.finish_reason, true];
      }
      // Long texts are drawn less often.
      if (performance.now() - drawn > 30 + message.content.length / 2000) update();
    }
    if (!ended) throw new TypeError("the stream has ended early");
    tell("");
  } catch (error) {
    if (control.signal.aborted) message.reason = "stopped";
    else if (error instanceof Told) message.error = error.message;
    else {
      message.error = "The server is gone: the answer is not whole.";
      gone();
    }
  }
  keep();
  if (running === control) {
    running = null;
    $("send").hidden = false;
    $("stop").hidden = true;
  }
  node.removeAttribute("aria-busy");
  if (conversation === current && node.isConnected) {
    update();
    node.finish();
  }
}

// Say that the server is gone, until it answers again.
let waiting = null;
function gone() {
  tell("The server is gone. Start it again; this page goes on when it answers.");
  waiting ??= setInterval(async () => {
    if (await connect().catch(() => false)) {
      clearInterval(waiting);
      waiting = null;
      tell("");
    }
  }, 1000);
}

async function connect() {
  const response = await fetch("v1/models", { headers: headers() });
  if (response.status === 401) {
    tell("This server needs an API key: give it in the settings.");
    return true;
  }
  if (!response.ok) throw new TypeError("no models");
  model = (await response.json()).data[0].id;
  $("model").textContent = model;
  document.title = `${model} · Megalight`;
  return true;
}

// ---- Controls ----

function openSettings() {
  for (const name of FIELDS) $(name)[name === "probabilities" ? "checked" : "value"] = settings[name] ?? "";
  $("key").value = sessionStorage.getItem("megalight.key") ?? "";
  if (!$("settings").open) $("settings").showModal();
}

$("settings").addEventListener("close", () => {
  for (const name of FIELDS) settings[name] = name === "probabilities" ? $(name).checked : $(name).value;
  localStorage.setItem(SETTINGS, JSON.stringify(settings));
  sessionStorage.setItem("megalight.key", $("key").value.trim());
  theme();
  tell("");
  connect().catch(gone);
  $("prompt").focus();
});

const theme = () => (document.documentElement.dataset.theme = settings.theme ?? "");

function change(conversation) {
  running?.abort();
  current = conversation;
  draw();
  $("prompt").focus();
}

const fresh = () => change(current.messages.length ? begin() : current);

$("open-settings").addEventListener("click", openSettings);
$("new").addEventListener("click", fresh);
$("conversations").addEventListener("change", (event) => change(conversations.find((each) => each.id === event.target.value)));
$("delete").addEventListener("click", () => {
  if (current.messages.length && !confirm("Delete this conversation?")) return;
  running?.abort();
  deleted.add(current.id);
  conversations = conversations.filter((each) => each !== current);
  keep();
  change(conversations[0] ?? begin());
});
$("stop").addEventListener("click", () => {
  running?.abort();
  $("prompt").focus();
});
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const content = $("prompt").value;
  if (!content.trim() || running) return;
  $("prompt").value = "";
  current.messages.push({ role: "user", content });
  keep();
  ask(current.messages.length);
});
$("prompt").addEventListener("keydown", (event) => {
  if (!sends(event)) return;
  event.preventDefault();
  $("composer").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running && !$("settings").open) $("stop").click();
  if (event.altKey && event.code === "KeyN") fresh();
  if (event.altKey && event.code === "KeyS") openSettings();
});
addEventListener("pagehide", () => running && keep());

theme();
draw();
connect().catch(gone);
