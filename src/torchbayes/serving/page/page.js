"use strict";
// Everything from the server is put on the page as text, never as markup.

const byId = (id) => document.getElementById(id);
const numbers = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)}\u00a0%`;

function make(tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined && text !== null) element.textContent = text;
  if (className) element.className = className;
  return element;
}

let schema = null;
let mode = null;
let file = null;

// Inputs

function size(shape) {
  return shape.reduce((product, side) => product * side, 1);
}

function filled(shape, value) {
  if (shape.length === 0) return value;
  return Array.from({ length: shape[0] }, () => filled(shape.slice(1), value));
}

function reshaped(flat, shape) {
  if (shape.length <= 1) return flat;
  const step = flat.length / shape[0];
  return Array.from({ length: shape[0] }, (_, i) => reshaped(flat.slice(i * step, (i + 1) * step), shape.slice(1)));
}

function modesOf(input) {
  if (input.kind === "image") return ["Image", "JSON"];
  if (input.kind === "table") return ["Form", "JSON or CSV"];
  return input.shape.length && size(input.shape) <= 16 ? ["Form", "JSON"] : ["JSON"];
}

function chooseMode(name) {
  mode = name;
  for (const button of byId("modes").children) {
    button.setAttribute("aria-pressed", String(button.textContent === name));
  }
  const build = { Image: imageField, Form: formFields };
  byId("fields").replaceChildren((build[name] || textField)());
  showProgram();
}

function imageField() {
  const box = make("label", null, "drop");
  const input = make("input");
  input.type = "file";
  input.id = "file";
  input.accept = schema.limits.formats.map((name) => `image/${name.toLowerCase()}`).join(",");
  const text = make("span");
  text.append("Drop an image here, or ", make("span", "choose a file", "choose"));
  box.append(input, text);
  const take = (chosen) => {
    if (!chosen) return;
    file = chosen;
    const image = make("img");
    image.alt = "The chosen image";
    image.addEventListener("load", () => {
      image.classList.toggle("small", image.naturalWidth < 100);
      URL.revokeObjectURL(image.src);
    });
    image.addEventListener("error", () => image.remove());
    image.src = URL.createObjectURL(chosen);
    text.replaceChildren(make("span", chosen.name, "file soft"));
    for (const old of box.querySelectorAll("img")) old.remove();
    box.insertBefore(image, text);
    ask();
  };
  input.addEventListener("change", () => take(input.files[0]));
  for (const name of ["dragover", "dragleave", "drop"]) {
    box.addEventListener(name, (event) => {
      event.preventDefault();
      box.classList.toggle("over", name === "dragover");
      if (name === "drop") take(event.dataTransfer.files[0]);
    });
  }
  file = null;
  return box;
}

function columns() {
  if (schema.input.kind === "table") return schema.input.columns;
  return Array.from({ length: size(schema.input.shape) }, (_, i) => ({ name: `x${i + 1}`, kind: "number", typical: 0 }));
}

function formFields() {
  const grid = make("div", null, "grid");
  columns().forEach((column, number) => {
    const cell = make("div");
    const label = make("label", column.name);
    label.htmlFor = `field-${number}`;
    let input;
    if (column.kind === "level") {
      input = make("select");
      for (const level of column.levels) input.append(new Option(level, level));
      input.append(new Option("(missing)", ""));
      input.value = column.typical;
    } else {
      input = make("input");
      input.type = "text";
      input.inputMode = "decimal";
      input.autocomplete = "off";
      input.value = numbers.format(column.typical).replaceAll(",", "");
      if (schema.input.kind === "table") input.placeholder = "missing";
    }
    input.id = label.htmlFor;
    input.addEventListener("input", showProgram);
    cell.append(label, input);
    grid.append(cell);
  });
  return grid;
}

function textField() {
  const cell = make("div");
  const table = schema.input.kind === "table";
  const label = make("label", table ? "Rows as JSON, or as CSV with a line of column names" : `Examples as JSON, ${JSON.stringify(schema.input.shape)} each, ${schema.input.values}`);
  label.htmlFor = "text";
  const area = make("textarea");
  area.id = "text";
  area.spellcheck = false;
  if (table) {
    const row = Object.fromEntries(columns().map((column) => [column.name, column.typical]));
    area.value = JSON.stringify({ rows: [row] }, null, 2);
  } else if (size(schema.input.shape) <= 64 && schema.input.shape.length) {
    area.value = JSON.stringify({ inputs: [filled(schema.input.shape, 0)] });
  } else {
    area.placeholder = '{"inputs": [ … ]}';
  }
  area.addEventListener("input", showProgram);
  cell.append(label, area);
  return cell;
}

function csvRows(text) {
  const lines = [];
  const delimiter = [",", ";", "\t"].map((d) => [text.split("\n")[0].split(d).length, d]).sort((a, b) => b[0] - a[0])[0][1];
  let fields = [];
  let field = "";
  let quoted = false;
  const endField = () => { fields.push(field.trim()); field = ""; };
  const endLine = () => { endField(); if (fields.some((f) => f !== "")) lines.push(fields); fields = []; };
  for (let i = 0; i < text.length; i += 1) {
    const c = text[i];
    if (quoted) {
      if (c !== '"') field += c;
      else if (text[i + 1] === '"') { field += '"'; i += 1; } else quoted = false;
    } else if (c === '"' && field.trim() === "") { quoted = true; field = ""; }
    else if (c === delimiter) endField();
    else if (c === "\n") endLine();
    else if (c !== "\r") field += c;
  }
  endLine();
  const [names, ...rows] = lines;
  if (!names || rows.length === 0) throw new Error("give a line of column names and at least one row");
  return rows.map((row) => Object.fromEntries(names.map((name, i) => [name, row[i] === undefined || row[i] === "" ? null : row[i]])));
}

function content() {
  const key = schema.input.kind === "table" ? "rows" : "inputs";
  if (mode === "Form") {
    const values = columns().map((_, number) => {
      const text = byId(`field-${number}`).value.trim();
      if (text === "") return null;
      const column = columns()[number];
      return column.kind === "number" && Number.isFinite(Number(text)) ? Number(text) : text;
    });
    if (key === "rows") return { rows: [Object.fromEntries(columns().map((column, i) => [column.name, values[i]]))] };
    return { inputs: [reshaped(values, schema.input.shape)] };
  }
  const text = byId("text").value.trim();
  if (text === "") throw new Error("the text is empty");
  if (key === "rows" && !/^[[{]/.test(text)) return { rows: csvRows(text) };
  const parsed = JSON.parse(text);
  if (Array.isArray(parsed)) return { [key]: parsed };
  return key in parsed ? parsed : { [key]: [parsed] };
}

function showProgram() {
  const here = window.location.origin;
  let command;
  if (mode === "Image") {
    command = `curl -F file=@image.png ${here}/predict/image`;
  } else {
    let body;
    try { body = JSON.stringify(content()); } catch { body = '{"inputs": …}'; }
    if (body.length > 2000) body = `${body.slice(0, 2000)}…`;
    command = `curl -H 'Content-Type: application/json' \\\n  -d '${body.replaceAll("'", "'\\''")}' \\\n  ${here}/predict`;
  }
  byId("curl").textContent = command;
}

// Answers

async function ask() {
  const error = byId("error");
  let request;
  try {
    if (mode === "Image") {
      if (!file) throw new Error("choose an image first");
      const form = new FormData();
      form.append("file", file);
      request = ["/predict/image", { method: "POST", body: form }];
    } else {
      request = ["/predict", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(content()) }];
    }
  } catch (problem) {
    showError(problem instanceof SyntaxError ? `this is not valid JSON: ${problem.message}` : problem.message);
    return;
  }
  byId("go").disabled = true;
  byId("busy").textContent = "predicting …";
  try {
    const response = await fetch(...request);
    const told = await response.json();
    if (response.ok) {
      error.hidden = true;
      show(told);
    } else {
      showError(told.error);
    }
  } catch {
    showError("the server does not answer: is it still running?");
  } finally {
    byId("go").disabled = false;
    byId("busy").textContent = "";
  }
}

function showError(sentence) {
  byId("error").textContent = sentence;
  byId("error").hidden = false;
  byId("empty").hidden = true;
  byId("answer").hidden = true;
  byId("told").scrollIntoView({ block: "nearest" });
}

function show(told) {
  const [first] = told.predictions;
  const parts = "probabilities" in first ? classParts(first) : numberParts(first);
  if (told.predictions.length > 1) parts.push(...allParts(told.predictions));
  const notes = make("ul", null, "notes");
  for (const note of [`average of ${told.draws} draw${told.draws === 1 ? "" : "s"} of the weights`, ...told.notes]) notes.append(make("li", note));
  byId("answer").replaceChildren(...parts, notes);
  byId("answer").hidden = false;
  byId("empty").hidden = true;
  byId("told").scrollIntoView({ block: "nearest" });
}

function verdict(value, sure) {
  const line = make("p", null, "verdict");
  line.append(make("span", value, "value"), make("span", sure, "sure"));
  return line;
}

function classParts(row) {
  const parts = [verdict(row.prediction, `${percent(row.confidence)} sure`)];
  if ("risk" in row) {
    const yes = row.risk !== null;
    const text = yes ? `Answered: of such answers at most ${percent(row.risk, row.risk < 0.1 ? 0 : 1)} are wrong.` : "Abstains: not sure enough for any of the risks that it was calibrated for.";
    parts.push(make("p", text, `state ${yes ? "yes" : "no"}`));
  }
  const sorted = Object.entries(row.probabilities).sort((a, b) => b[1] - a[1]);
  const bars = make("ul", null, "bars");
  // Those that matter, but never a single one.
  const shown = Math.min(8, Math.max(3, sorted.filter(([, share]) => share >= 0.001).length));
  sorted.slice(0, shown).forEach(([name, share], place) => {
    const line = make("li", null, place === 0 ? "best" : "");
    const who = make("span", name, "who");
    who.title = name;
    const track = make("span", null, "track");
    const fill = make("span", null, "fill");
    fill.style.width = `${100 * share}%`;
    track.append(fill);
    line.append(who, track, make("span", percent(share), "much"));
    bars.append(line);
  });
  parts.push(make("h3", "Probabilities"), bars);
  if (sorted.length > shown) {
    const rest = sorted.slice(shown).reduce((sum, [, share]) => sum + share, 0);
    const count = sorted.length - shown;
    parts.push(make("p", `${count} more class${count === 1 ? "" : "es"}: ${percent(rest)}${count === 1 ? "" : " together"}`, "soft rest"));
  }
  if (row.sets) {
    const coverage = Object.keys(row.sets).sort((a, b) => Math.abs(a - 90) - Math.abs(b - 90))[0];
    const chips = make("div");
    for (const name of row.sets[coverage]) chips.append(make("span", name, "chip"));
    if (row.sets[coverage].length === 0) chips.append(make("p", "None conforms: take it as something unknown.", "soft"));
    parts.push(make("h3", `Set that contains the truth ${coverage} times in 100`), chips);
  }
  const most = Math.log(sorted.length);
  const entropy = row.entropy;
  let meaning = "Nearly no uncertainty.";
  if (entropy > 0.1 * most) meaning = row.epistemic > row.aleatoric ? "Mostly epistemic: the network has not seen enough examples like this one." : "Mostly aleatoric: the example itself is ambiguous.";
  parts.push(make("h3", "Uncertainty"), ...shares(row.aleatoric / most, row.epistemic / most, `aleatoric ${numbers.format(row.aleatoric)} nats`, `epistemic ${numbers.format(row.epistemic)} nats`), make("p", meaning, "soft rest"));
  return parts;
}

function numberParts(row) {
  const parts = [verdict(numbers.format(row.prediction), `± ${numbers.format(row.std)}${schema.target ? ` (${schema.target})` : ""}`)];
  if (row.lower90 !== null && row.upper90 !== null) {
    const width = row.upper90 - row.lower90 || 1;
    const low = row.lower90 - 0.25 * width;
    const at = (value) => `${Math.min(100, Math.max(0, 100 * (value - low) / (1.5 * width)))}%`;
    const scale = make("div", null, "scale");
    const band = make("span", null, "band");
    band.style.left = at(row.lower90);
    band.style.width = `${100 / 1.5}%`;
    const middle = make("span", null, "middle");
    middle.style.left = at(row.prediction);
    scale.append(band, middle);
    for (const value of [row.lower90, row.upper90]) {
      const tick = make("span", numbers.format(value), "tick");
      tick.style.left = at(value);
      scale.append(tick);
    }
    parts.push(make("h3", "Interval that contains 90 of 100 observations"), scale);
  } else {
    parts.push(make("p", "There were too few examples to calibrate a 90 % interval.", "soft"));
  }
  const total = row.aleatoric ** 2 + row.epistemic ** 2 || 1;
  const meaning = row.epistemic > row.aleatoric ? "Mostly epistemic: the network has not seen enough examples like this one." : "Mostly aleatoric: the target is noisy around what the network predicts.";
  parts.push(make("h3", "Uncertainty"), ...shares(row.aleatoric ** 2 / total, row.epistemic ** 2 / total, `aleatoric std ${numbers.format(row.aleatoric)}`, `epistemic std ${numbers.format(row.epistemic)}`), make("p", meaning, "soft rest"));
  return parts;
}

function shares(aleatoric, epistemic, aleatoricText, epistemicText) {
  const bar = make("div", null, "parts");
  for (const [name, share] of [["aleatoric", aleatoric], ["epistemic", epistemic]]) {
    const part = make("span", null, name);
    part.style.width = `${100 * Math.min(1, Math.max(0, share))}%`;
    bar.append(part);
  }
  const key = make("ul", null, "key");
  key.append(make("li", aleatoricText, "aleatoric"), make("li", epistemicText, "epistemic"));
  return [bar, key];
}

function allParts(rows) {
  const classes = "probabilities" in rows[0];
  const table = make("table");
  const head = make("tr");
  for (const name of ["", "prediction", classes ? "confidence" : "std", "epistemic"]) head.append(make("th", name));
  table.append(make("thead"), make("tbody"));
  table.tHead.append(head);
  rows.slice(0, 50).forEach((row, number) => {
    const line = make("tr");
    const cells = [number + 1, classes ? row.prediction : numbers.format(row.prediction), classes ? percent(row.confidence) : numbers.format(row.std), numbers.format(row.epistemic)];
    for (const cell of cells) line.append(make("td", cell));
    table.tBodies[0].append(line);
  });
  const title = rows.length > 50 ? `The first 50 of ${rows.length} examples (above: the first)` : `All ${rows.length} examples (above: the first)`;
  return [make("h3", title), table];
}

// Start

async function start() {
  const response = await fetch("/schema");
  schema = await response.json();
  byId("name").textContent = schema.name || "A torchbayes run";
  document.title = `${schema.name || "run"} · torchbayes`;
  const about = [schema.network, schema.method, schema.data, `${schema.draws} draw${schema.draws === 1 ? "" : "s"}`];
  about.push(schema.calibration ? "calibrated" : "not calibrated");
  byId("about").textContent = about.filter(Boolean).join(" · ");
  const names = modesOf(schema.input);
  for (const name of names) {
    const button = make("button", name);
    button.type = "button";
    button.addEventListener("click", () => chooseMode(name));
    byId("modes").append(button);
  }
  byId("modes").hidden = names.length < 2;
  byId("form").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
  chooseMode(names[0]);
}

start().catch(() => showError("the server does not answer: is it still running?"));
