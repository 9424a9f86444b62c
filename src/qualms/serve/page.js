"use strict";
// The page of `qualms serve`: it asks /api/… and shows the answers. Texts become text, never HTML.

const TOKEN = new URLSearchParams(location.search).get("token");
const MOST_ROWS = 300;
const PALETTE = "viridis";
const state = { models: [], model: null, given: null, file: null, result: null, current: 0, atom: null, chosen: new Set(), color: null, arrows: false };
let running = null, assessing = null, viewer = null, nearViewer = null, drawn = {};

const $ = (id) => document.getElementById(id);

// An element with attributes, and texts or elements inside. Functions are listeners.
function make(tag, attributes = {}, ...inside) {
  const isSvg = ["svg", "g", "path", "polyline", "polygon", "line", "circle", "text", "title"].includes(tag);
  const element = isSvg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...inside.filter((item) => item !== null));
  return element;
}
const near = make("div", { id: "near", hidden: true }); // a similar training structure
const table = (caption, headers, rows) => make("table", { "aria-label": caption, class: "labels" },
  make("thead", {}, make("tr", {}, ...headers.map((text) => make("th", { scope: "col" }, text)))),
  make("tbody", {}, ...rows));
const row = (cells, attributes = {}) => make("tr", attributes, ...cells.map((cell, i) => i ? make("td", {}, cell) : make("th", { scope: "row" }, cell)));

// --- numbers ---

const decimals = (error) => Math.max(0, 1 - Math.floor(Math.log10(error)));
const number = (value, error) => value === null || value === undefined ? "–"
  : error > 0 && error > 1e-13 * Math.abs(value) ? value.toFixed(Math.min(decimals(error), 20)) : Number(value.toPrecision(6)).toString();
const plusMinus = (value, error) => value === null ? "–" : `${number(value, error)} ± ${number(error, error)}`;
const brief = (value) => value === null ? "–" : Number(value.toPrecision(3)).toString();
const withUnits = (text, units) => units ? `${text} ${units}` : text;

// --- requests ---

const headers = (more) => ({ Authorization: `Bearer ${TOKEN}`, ...more });

// Returns the result of a task on the file; `advance` is called with what is known of its progress.
async function run(task, parameters, file, signal, advance = () => {}) {
  const query = new URLSearchParams({ model: file.model, name: file.name, ...parameters });
  const response = await fetch(`api/${task}?${query}`, { method: "POST", headers: headers({ Accept: "application/x-ndjson" }), body: file.content, signal });
  if (!response.ok) throw new Error((await response.json()).error.message);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let parts = [];
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("The connection to qualms is lost: is it still running?");
    parts.push(value);
    if (!value.includes("\n")) continue;
    const lines = parts.join("").split("\n");
    parts = [lines.pop()];
    for (const line of lines) {
      const event = JSON.parse(line);
      if (event.event === "result") return event.result;
      if (event.event === "error") throw new Error(event.message);
      advance(event);
    }
  }
}

function fail(error) {
  if (error.name === "AbortError") $("status").textContent = "Cancelled.";
  else $("error").textContent = error instanceof TypeError ? "qualms does not answer: is it still running?" : error.message;
}

// Runs one thing at a time, with its progress and a button that cancels it.
async function working(what, work) {
  if (running) running.abort();
  const own = running = new AbortController();
  const bar = $("progress").querySelector("progress");
  const advance = (event) => {
    if (event.event === "progress") { bar.max = Math.max(event.total, 1); bar.value = event.done; $("done").textContent = `${event.done} of ${event.total}`; }
    else $("done").textContent = `${$("done").textContent.split(",")[0] || "waiting"}, ${event.seconds.toFixed(0)} s`;
  };
  bar.removeAttribute("value");
  $("error").textContent = $("done").textContent = "";
  $("status").textContent = what;
  const show = setTimeout(() => { $("progress").hidden = false; }, 300);
  try {
    return await work(own.signal, advance);
  } catch (error) {
    if (own === running) fail(error);
    return null;
  } finally {
    clearTimeout(show);
    if (own === running) {
      running = null;
      $("progress").hidden = true;
      if ($("status").textContent === what) $("status").textContent = "";
    }
  }
}

// What is shown remains, with its file and its model, unless another prediction succeeds.
async function predict(given, view = {}) {
  state.given = given;
  const file = { ...given, model: state.model.name };
  const result = await working(`Predicting ${file.name} …`, (signal, advance) => run("predict", {}, file, signal, advance));
  if (!result) return;
  Object.assign(state, { file, result, current: 0, atom: null, chosen: new Set() }, view);
  // A link may be of another file of the same name.
  state.current = Math.min(state.current, result.structures.length - 1);
  if (state.atom >= selected().n_atoms) state.atom = null;
  state.chosen = new Set([...state.chosen].filter((i) => result.structures[i]?.value !== undefined));
  $("status").textContent = `${result.structures.length === 1 ? "1 structure" : `${result.structures.length} structures`} of ${result.name}.`;
  $("results").hidden = false;
  $("warnings").replaceChildren(...result.warnings.map((text) => make("li", {}, text)));
  startViewer();
  drawAll();
  select(state.current, state.atom);
  assess(file);
}

// --- one structure ---

const selected = () => state.result.structures[state.current];
const isAtomic = () => state.result.kind === "atomic";

// What atoms can be coloured by: name of the column, text, units.
function columns() {
  const { units, force_units: forceUnits, target } = state.result;
  return [
    ["force_uncertainty", "σ of the force", forceUnits],
    ["property", target, units],
    ["property_uncertainty", `σ of ${target}`, units],
    ["contribution_uncertainty", "σ of the contribution", units],
    ["novelty", "novelty (relative)", ""],
    ["contribution", "contribution", units],
  ].filter(([name]) => state.result.structures.some((s) => s.atoms && name in s.atoms));
}

function select(index, atom = null) {
  state.current = index;
  state.atom = atom;
  const s = selected(), { units, target } = state.result;
  $("title").textContent = `${state.result.structures.length > 1 ? `Structure ${index}: ` : ""}${s.formula}`;
  const domain = $("domain");
  if (s.problem) {
    $("value").textContent = "No prediction";
    $("intervals").textContent = "";
    domain.className = "assessment wrong";
    domain.replaceChildren(make("p", {}, "It cannot be predicted"), make("p", {}, s.problem));
  } else {
    const n = isAtomic() ? s.atoms.property.filter((value) => value !== null).length : 0;
    $("value").textContent = isAtomic() ? `${target} of ${n} atom${n === 1 ? "" : "s"}` : withUnits(`${target}: ${plusMinus(s.value, s.uncertainty)}`, units);
    $("intervals").textContent = isAtomic() ? "" : intervalText(s.intervals, s.uncertainty, units) + reference(s);
    domain.className = `assessment ${s.extrapolates ? "wrong" : "calibrated"}`;
    const most = `Its most novel environment is at ${brief(s.novelty)} × the limit.`;
    domain.replaceChildren(
      make("p", {}, s.extrapolates ? "Out of distribution: the uncertainty is less reliable" : "In the training domain"),
      ...(s.reasons.length ? s.reasons.map((text) => make("p", {}, `${text[0].toUpperCase()}${text.slice(1)}.`)) : [make("p", {}, most)]));
  }
  $("stress").hidden = !s.stress;
  if (s.stress) {
    const names = ["xx", "yy", "zz", "yz", "xz", "xy"];
    $("stress").querySelector("p").textContent = `${names.map((name, i) => `${name} ${plusMinus(s.stress[i], s.stress_uncertainty[i])}`).join(", ")} ${state.result.stress_units}`;
  }
  drawAtoms();
  drawSpectra();
  drawSeries();
  selectAtom(atom);
  for (const line of $("list").querySelectorAll("tr[data-index]")) line.classList.toggle("selected", Number(line.dataset.index) === index);
}

const intervalText = (intervals, error, units) => Object.entries(intervals)
  .map(([level, [low, high]]) => withUnits(`${level} %: ${number(low, error)} to ${number(high, error)}`, units)).join("; ");
const reference = (s) => s.reference === undefined ? "" : `; reference ${number(s.reference, s.uncertainty)}, residual ${number(s.reference - s.value, s.uncertainty)}`;

// The value of an atom that is the most interesting: what is predicted of it.
function atomCells(s, i) {
  const of = (name) => s.atoms[name] ? s.atoms[name][i] : null;
  const cells = s.forces ? [...s.forces[i].map((x, k) => plusMinus(x, s.forces_uncertainty[i][k])), number(of("force_uncertainty"), of("force_uncertainty"))] : [];
  if (isAtomic()) {
    const [value, error, known] = [of("property"), of("property_uncertainty"), s.references ? s.references[i] : null];
    cells.push(plusMinus(value, error));
    if (s.references) cells.push(number(known, error), known === null || value === null ? "–" : number(known - value, error));
  } else cells.push(plusMinus(of("contribution"), of("contribution_uncertainty")));
  cells.push(of("novelty") === null ? "–" : of("novelty").toFixed(2));
  return cells;
}

function atomHeaders(s) {
  const { units, force_units: forceUnits, target } = state.result;
  const forces = s.forces ? [...["x", "y", "z"].map((c) => `F${c} ± σ, ${forceUnits}`), `σ of the force, ${forceUnits}`] : [];
  const own = isAtomic() ? [`${target} ± σ${units ? `, ${units}` : ""}`, ...(s.references ? ["reference", "residual"] : [])] : [`contribution ± σ${units ? `, ${units}` : ""}`];
  return [...forces, ...own, "novelty"];
}

function drawAtoms() {
  const s = selected(), place = $("atoms-table").querySelector(".scroll");
  $("atoms-table").hidden = Boolean(s.problem);
  if (s.problem) { place.replaceChildren(); return; }
  if (isAtomic()) $("atoms-table").open = true;
  const all = [...s.symbols.keys()].filter((i) => !isAtomic() || s.atoms.property[i] !== null);
  const rows = all.slice(0, MOST_ROWS).map((i) => row([
    make("button", { type: "button", click: () => selectAtom(i) }, `${i} ${s.symbols[i]}`), ...atomCells(s, i)], { "data-atom": i }));
  place.replaceChildren(table("Atoms", ["atom", ...atomHeaders(s)], rows),
    make("p", { class: "note" }, all.length > MOST_ROWS ? `The first ${MOST_ROWS} of ${all.length} atoms; the downloads have all.` : ""));
}

async function selectAtom(i) {
  const s = selected(), place = $("atom"), file = state.file;
  state.atom = i;
  loadStructure();
  updateLink();
  for (const line of $("atoms-table").querySelectorAll("tr[data-atom]")) line.classList.toggle("selected", Number(line.dataset.atom) === i);
  place.hidden = i === null || Boolean(s.problem);
  if (place.hidden) return;
  const cells = atomCells(s, i), names = atomHeaders(s), waiting = make("p", { class: "note" }, "Looking for similar training environments …");
  const limits = isAtomic() && s.atoms.property[i] !== null && Object.entries(s.atoms_intervals)
    .map(([level, ends]) => row([`${level} %`, ends[i].map((end) => number(end, s.atoms.property_uncertainty[i])).join(" to ")]));
  place.replaceChildren(make("h3", {}, `Atom ${i} (${s.symbols[i]})`),
    make("table", { "aria-label": `Atom ${i}`, class: "labels" }, make("tbody", {}, ...names.map((name, k) => row([name, cells[k]])), ...(limits || []))),
    make("h3", {}, "Most similar training environments"), waiting);
  try {
    const { similar, training } = await run("similar", { structure: state.current, atom: i }, file);
    if (state.atom !== i || selected() !== s) return;
    waiting.replaceWith(table("Most similar training environments", ["structure", "atom", "similarity"], similar.map((one) => row([
      one.geometry ? make("button", { type: "button", click: () => drawNear(one) }, `${one.structure}: ${one.geometry.formula}`) : `${one.structure}`,
      one.geometry ? `${one.atom} ${one.geometry.symbols[one.atom]}` : `${one.atom}`, one.similarity.toFixed(4)]))),
    make("p", { class: "note" }, training),
    near);
    near.hidden = true;
  } catch (error) { waiting.textContent = error.message; }
}

// --- the view of the structure ---

const geometry = (s, cutoff = 4) => ({
  structure: { size: s.n_atoms, names: s.symbols, x: s.positions.map((r) => r[0]), y: s.positions.map((r) => r[1]), z: s.positions.map((r) => r[2]), ...(s.cell ? { cell: s.cell.flat() } : {}) },
  environments: s.symbols.map((_, center) => ({ structure: 0, center, cutoff })),
});

function newViewer(place, names) {
  const warnings = new Chemiscope.Warnings();
  warnings.addHandler((text) => { if (!/undefined properties|min > max/.test(text)) $("viewer-message").textContent = String(text); });
  const made = new Chemiscope.MoleculeViewer(place, names, warnings);
  // Its settings would need styles that the viewer alone does not have; the page has its own.
  const sheet = new CSSStyleSheet();
  sheet.replaceSync(".chsp-viewer-button, .chsp-cell-info { display: none; }");
  const { shadowRoot } = place.firstElementChild;
  shadowRoot.adoptedStyleSheets = [...shadowRoot.adoptedStyleSheets, sheet];
  made._updateColorBar = () => {}; // each of its labels would draw everything again
  made.applySettings({ environments: { activated: false }, unitCell: true });
  return made;
}

// Draws once, after all changes.
function drawOnce(work) {
  const inner = viewer._viewer, { show } = inner;
  inner.show = () => {};
  try { work(); } finally { inner.show = show; }
  inner.render();
}

function startViewer() {
  const found = columns();
  // That which was chosen, if there is such a column.
  const color = state.color === "element" || found.some(([name]) => name === state.color) ? state.color : found.length ? found[0][0] : "element";
  $("color").replaceChildren(make("option", { value: "element" }, "element"), ...found.map(([name, text]) => make("option", { value: name }, text)));
  $("color").value = color;
  const hasForces = state.result.structures.some((s) => s.forces);
  $("arrows-field").hidden = !hasForces;
  $("arrows").checked = state.arrows = state.arrows && hasForces;
  const longest = Math.max(1e-12, ...state.result.structures.flatMap((s) => s.forces || []).map((f) => Math.hypot(...f)));
  drawn = { color, arrow: 3 / longest, range: {}, names: Object.fromEntries(found.map(([name, text, units]) => [name, withUnits(text, units && `/ ${units}`).replace(/[<>&]/g, "")])) };
  for (const [name] of found) {
    // The same in all structures; it contains 99 % of the atoms.
    const values = state.result.structures.flatMap((s) => s.atoms ? s.atoms[name] : []).filter((value) => value !== null).sort((a, b) => a - b);
    const low = values[0] ?? 0, high = values[Math.ceil(0.99 * (values.length - 1))] ?? 0;
    drawn.range[name] = [low, high > low ? high : low + 1e-6 * (Math.abs(low) || 1)];
  }
  if (!window.Chemiscope) { $("viewer-message").textContent = "The view of structures needs chemiscope: pip install 'qualms[report]'."; return; }
  const names = Object.values(drawn.names);
  try {
    if (viewer) { // one for all files: those that are removed would still draw
      drawOnce(() => {
        viewer.applySettings({ shape: "", color: { property: "element" } });
        viewer.refreshOptions(true, names);
      });
      return;
    }
    viewer = newViewer($("viewer"), names);
    viewer.onselect = (atom) => selectAtom(atom % selected().n_atoms);
  } catch (error) { $("viewer-message").textContent = `The structure cannot be shown: ${error.message || error}. It needs a browser with WebGL.`; }
}

function loadStructure() {
  const s = selected();
  if (!viewer) return;
  const { structure, environments } = geometry(s);
  const values = Object.fromEntries(Object.entries(drawn.names).map(([name, text]) => [text, s.atoms ? s.atoms[name] : s.symbols.map(() => null)]));
  const vectors = s.forces || s.symbols.map(() => [0, 0, 0]);
  structure.shapes = { forces: { kind: "arrow", parameters: { global: { baseRadius: 0.1, headRadius: 0.2, headLength: 0.3, color: 0xa31515 }, atom: vectors.map((f) => ({ vector: f.map((x) => x * drawn.arrow) })) } } };
  drawOnce(() => {
    viewer.load(structure, Object.keys(values).length ? values : undefined, { environments, trajectory: false, highlight: state.atom ?? undefined, keepOrientation: drawn.formula === s.formula });
    if (drawn.formula !== s.formula) viewer._viewer.zoom(0.8); // the viewer crops wide molecules
    drawn.formula = s.formula;
    paint();
  });
}

function paint() {
  const name = drawn.names[drawn.color], range = drawn.range[drawn.color];
  const isColoured = name !== undefined && !selected().problem;
  $("bar").hidden = !isColoured;
  if (isColoured) [$("bar-min").textContent, $("bar-max").textContent, $("bar-name").textContent] = [brief(range[0]), brief(range[1]), name];
  if (!viewer) return;
  viewer.applySettings({ shape: state.arrows && selected().forces ? "forces" : "", color: isColoured ? { property: name, palette: PALETTE } : { property: "element" } });
  // The viewer rejects a minimum above the maximum that it has, and the reverse.
  for (const color of isColoured ? [{ min: -1e300 }, { max: range[1] }, { min: range[0] }] : []) viewer.applySettings({ color });
}

function drawNear(one) {
  near.hidden = false;
  if (!window.Chemiscope) return;
  nearViewer ??= newViewer(near, []);
  const { structure, environments } = geometry(one.geometry);
  nearViewer.load(structure, undefined, { environments, trajectory: false });
  nearViewer._viewer.zoom(0.8);
  nearViewer.highlight(one.atom);
}

// --- figures ---

const scale = (low, high, from, to) => (value) => from + (to - from) * (high > low ? (value - low) / (high - low) : 0.5);

function axes(svg, x, y, [left, right, bottom], xLabel, yLabel, xTicks, yTicks) {
  svg.append(make("path", { class: "axis", d: `M${left} 20V${bottom}H${right}` }),
    ...xTicks.map(([value, text]) => make("text", { x: x(value), y: bottom + 16, "text-anchor": "middle" }, text)),
    ...yTicks.map(([value, text]) => make("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, text)),
    make("text", { x: (left + right) / 2, y: bottom + 34, "text-anchor": "middle" }, xLabel),
    make("text", { x: left, y: 12, "text-anchor": "middle" }, yLabel));
}

// Value ± σ of each structure; a click selects the nearest.
function drawSeries() {
  const { structures, units, target } = state.result;
  $("frames").hidden = structures.length < 2;
  if (structures.length < 2) return;
  $("frame").max = structures.length - 1;
  $("frame").value = state.current;
  $("frame-number").textContent = `${state.current} of ${structures.length - 1}`;
  const points = structures.filter((s) => s.value !== undefined).map((s) => [s.index, s.value, s.uncertainty]);
  if (!points.length) { $("series").replaceChildren(); return; }
  const low = points.reduce((a, [, v, e]) => Math.min(a, v - e), Infinity), high = points.reduce((a, [, v, e]) => Math.max(a, v + e), -Infinity);
  const x = scale(0, structures.length - 1, 92, 470), y = scale(low, high, 210, 26);
  const svg = make("svg", { viewBox: "0 0 480 260", class: "click", role: "img", "aria-label": `${target} ± σ of each structure, from ${brief(low)} to ${brief(high)} ${units}`,
    click: (event) => {
      const at = svg.getBoundingClientRect(), place = (event.clientX - at.left) * 480 / at.width;
      select(points.reduce((best, [i]) => Math.abs(x(i) - place) < Math.abs(x(best) - place) ? i : best, points[0][0]));
    } });
  const tick = (value) => number(value, (high - low) / 50 || 1);
  axes(svg, x, y, [92, 470, 210], "structure", withUnits(target, units && `/ ${units}`), [[0, "0"], [structures.length - 1, `${structures.length - 1}`]], [[low, tick(low)], [(low + high) / 2, tick((low + high) / 2)], [high, tick(high)]]);
  svg.append(make("polygon", { class: "band", points: [...points.map(([i, v, e]) => `${x(i)},${y(v + e)}`), ...points.toReversed().map(([i, v, e]) => `${x(i)},${y(v - e)}`)].join(" ") }),
    make("polyline", { class: "line", points: points.map(([i, v]) => `${x(i)},${y(v)}`).join(" ") }));
  if (points.length <= 200) svg.append(...points.flatMap(([i, v, e]) => [make("line", { class: "line", x1: x(i), x2: x(i), y1: y(v - e), y2: y(v + e) }), make("circle", { class: "point", cx: x(i), cy: y(v), r: 3 })]));
  const s = selected();
  if (s.value !== undefined) svg.append(make("circle", { class: "current", cx: x(s.index), cy: y(s.value), r: 7 }));
  $("series").replaceChildren(svg);
}

// Sticks at the values of atoms, and their densities of width σ, for each element.
function drawSpectra() {
  const s = selected(), spectra = [];
  for (const element of isAtomic() && !s.problem ? new Set(s.symbols) : []) {
    const atoms = [...s.symbols.keys()].filter((i) => s.symbols[i] === element && s.atoms.property[i] !== null);
    if (!atoms.length) continue;
    const [values, errors] = ["property", "property_uncertainty"].map((name) => atoms.map((i) => s.atoms[name][i]));
    const low = Math.min(...values.map((v, k) => v - 3 * errors[k])), high = Math.max(...values.map((v, k) => v + 3 * errors[k]));
    const grid = Array.from({ length: 400 }, (_, k) => low + (high - low) * k / 399);
    const density = grid.map((at) => values.reduce((sum, v, k) => sum + Math.exp(-0.5 * ((at - v) / (errors[k] || 1e-9)) ** 2) / (errors[k] || 1e-9), 0));
    const x = scale(low, high, 30, 455), y = scale(0, density.reduce((a, b) => Math.max(a, b), 0), 150, 20);
    const top = (k) => 30 + 8 * (k % 8); // so that bars do not cover one another
    const svg = make("svg", { viewBox: "0 0 480 200", role: "img", "aria-label": `Spectrum of ${element}: ${atoms.length} values from ${brief(Math.min(...values))} to ${brief(Math.max(...values))} ${state.result.units}` });
    const ticks = [0, 1, 2, 3, 4].map((k) => low + (high - low) * k / 4);
    axes(svg, x, y, [30, 470, 150], withUnits(`${state.result.target} of ${element}`, state.result.units && `/ ${state.result.units}`), "", ticks.map((at) => [at, number(at, (high - low) / 20)]), []);
    svg.append(make("polygon", { class: "band", points: `${x(low)},150 ${grid.map((at, k) => `${x(at)},${y(density[k])}`).join(" ")} ${x(high)},150` }),
      ...values.map((v, k) => make("line", { class: "line", x1: x(v), x2: x(v), y1: 150, y2: top(k) }, make("title", {}, `atom ${atoms[k]}: ${plusMinus(v, errors[k])}`))),
      ...values.map((v, k) => make("line", { class: "line", x1: x(v - errors[k]), x2: x(v + errors[k]), y1: top(k), y2: top(k) })));
    spectra.push(make("figure", {}, svg, make("figcaption", {}, `Sticks at the predictions, with bars of ±σ; the area is the sum of their distributions.`)));
  }
  $("spectra").replaceChildren(...spectra);
}

// --- all structures ---

function drawAll() {
  const { structures, units, target } = state.result, hasReference = structures.some((s) => s.reference !== undefined);
  $("all").hidden = structures.length < 2;
  const value = isAtomic() ? [`largest σ of ${target}${units ? `, ${units}` : ""}`] : ["compare", `${target} ± σ${units ? `, ${units}` : ""}`, ...(hasReference ? ["reference", "residual"] : [])];
  const rows = structures.slice(0, MOST_ROWS).map((s) => {
    const open = make("button", { type: "button", click: () => { select(s.index); $("structure").scrollIntoView({ block: "start" }); } }, `${s.index}`);
    const box = make("input", { type: "checkbox", "aria-label": `Compare structure ${s.index}`, disabled: Boolean(s.problem), checked: state.chosen.has(s.index), change: (event) => { state.chosen[event.target.checked ? "add" : "delete"](s.index); compare(); updateLink(); } });
    const domain = make("span", { class: s.problem || s.extrapolates ? "out" : "in", title: s.problem || s.reasons.join("; ") }, s.problem ? "not predicted" : s.extrapolates ? "out" : "in");
    if (isAtomic()) return row([open, s.formula, s.problem ? "–" : brief(Math.max(...s.atoms.property_uncertainty.filter((v) => v !== null))), domain], { "data-index": s.index });
    return row([open, s.formula, box, s.problem ? "–" : plusMinus(s.value, s.uncertainty),
      ...(hasReference ? [number(s.reference, s.uncertainty), s.reference === undefined || s.problem ? "–" : number(s.reference - s.value, s.uncertainty)] : []), domain], { "data-index": s.index });
  });
  const made = table("All structures", ["structure", "formula", ...value, "domain"], rows);
  $("list").replaceChildren(...made.children);
  $("list-note").textContent = structures.length > MOST_ROWS ? `The first ${MOST_ROWS} of ${structures.length}; the slider reaches all.` : "";
  compare();
  drawRanking();
}

// The difference of two structures, member by member: their errors are correlated.
function compare() {
  const pair = [...state.chosen].sort((a, b) => a - b), place = $("difference");
  place.textContent = "";
  if (isAtomic()) return;
  if (pair.length !== 2) { place.textContent = "Two structures that are selected under “compare” have a difference with the uncertainty of correlated errors."; return; }
  const [a, b] = pair.map((i) => state.result.structures[i]);
  const differences = b.ensemble.map((member, k) => member - a.ensemble[k]), n = differences.length;
  const mean = differences.reduce((sum, d) => sum + d, 0) / n;
  const error = Math.sqrt(differences.reduce((sum, d) => sum + (d - mean) ** 2, 0) / (n - 1));
  const independent = Math.hypot(a.uncertainty, b.uncertainty);
  place.textContent = withUnits(`Structure ${pair[1]} minus structure ${pair[0]}: ${plusMinus(mean, error)}`, state.result.units)
    + ` (independent errors: ± ${number(independent, independent)}).`;
}

function drawRanking() {
  const { ranking, units, structures } = state.result;
  $("ranking").replaceChildren(...ranking.map((group) => {
    const most = group.structures.slice(0, 10);
    return make("div", {}, make("h3", {}, `Lowest ${group.per ? `${state.result.target} of ${group.formula}` : state.result.target}`),
      make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Ranking ${group.formula}` },
        table(`Ranking ${group.formula}`, ["rank", "structure", `${group.per ? `per ${group.per}` : "value"}${units ? `, ${units}` : ""}`, "probability to be the lowest"], most.map((i, k) => {
          const s = structures[i], size = group.per ? s.n_atoms : 1;
          return row([`${k + 1}`, `${i}: ${s.formula}`, plusMinus(s.value / size, s.uncertainty / size), `${(100 * group.probability[k]).toFixed(1)} %`]);
        }))), make("p", { class: "note" }, group.structures.length > 10 ? `The first 10 of ${group.structures.length}.` : ""));
  }));
}

// --- reference values ---

async function assess(file) {
  if (assessing) assessing.abort();
  const own = assessing = new AbortController();
  const known = state.result.structures.some((s) => s.reference !== undefined || s.references);
  $("evaluation").hidden = !known;
  document.querySelector("[data-format=html]").disabled = !known;
  document.querySelector("[data-format=html]").title = known ? "" : "A report needs reference values in the file.";
  if (!known) return;
  const place = $("assessment");
  place.replaceChildren(make("p", { class: "note" }, "Comparing with the reference values …"));
  try {
    const { quantities, remarks } = await run("evaluate", {}, file, own.signal);
    place.replaceChildren(...Object.values(quantities).flatMap((one) => [
      make("h3", {}, one.target),
      make("div", { class: `assessment ${one.assessment.grade}`, role: "note" }, make("p", {}, one.assessment.sentence), make("p", {}, one.assessment.details.join(" "))),
      make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Scores of ${one.target}` }, table(`Scores of ${one.target}`, one.scores.headers, one.scores.rows.map((cells) => row(cells))))]),
    make("ul", { class: "remarks" }, ...remarks.map((text) => make("li", {}, text))));
  } catch (error) {
    if (own === assessing) place.replaceChildren(make("p", {}, error.message));
  } finally {
    if (own === assessing) assessing = null;
  }
}

// --- downloads and links ---

async function download(format) {
  const task = format === "html" ? ["report", {}] : ["predict", { format }];
  const text = await working("Preparing the file …", (signal, advance) => run(...task, state.file, signal, advance));
  if (text === null) return;
  const url = URL.createObjectURL(new Blob([text], { type: "text/plain" }));
  const name = `${state.file.name.replace(/\..*/, "") || "structures"}-${format === "html" ? "report" : "predicted"}.${format}`;
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}

const through = async (bytes, stream) => new Uint8Array(await new Response(new Blob([bytes]).stream().pipeThrough(stream)).arrayBuffer());

// The link has the file itself, if that is small.
async function updateLink() {
  const file = state.file, view = { model: file.model, name: file.name, structure: state.current, color: drawn.color };
  if (state.atom !== null) view.atom = state.atom;
  if (state.arrows) view.arrows = 1;
  if (state.chosen.size) view.compare = [...state.chosen].join(",");
  file.packed ??= through(file.content, new CompressionStream("deflate")).then((bytes) => bytes.length > 30000 ? null : btoa(String.fromCharCode(...bytes)));
  const packed = await file.packed;
  if (packed !== null) view.file = packed;
  if (file !== state.file) return;
  $("link").href = `#${new URLSearchParams(view)}`;
  $("link-note").textContent = packed === null ? "It does not contain the file, which is too large for a link: choose that again." : "It contains the file, and works while qualms serve runs; later, put what begins with # behind the new address.";
}

let wanted = null; // a view whose file is too large for its link
let early = null; // a file that was given before the models were loaded

async function follow() {
  const link = new URLSearchParams(location.hash.slice(1));
  if (!link.has("name") || !state.models.length) return;
  const model = state.models.find((one) => one.name === link.get("model"));
  if (!model) { $("error").textContent = `There is no model ${link.get("model")}: name it after qualms serve, too.`; return; }
  chooseModel(model);
  const integer = (name) => /^\d{1,9}$/.test(link.get(name) ?? "") ? Number(link.get(name)) : null;
  const view = { current: integer("structure") ?? 0, atom: integer("atom"), color: link.get("color"), arrows: link.has("arrows"), chosen: new Set((link.get("compare") || "").split(",").filter((text) => /^\d{1,9}$/.test(text)).map(Number)) };
  if (!link.has("file")) { wanted = view; $("status").textContent = `Choose the file ${link.get("name")} again.`; return; }
  try {
    const bytes = Uint8Array.from(atob(link.get("file")), (c) => c.charCodeAt(0));
    await predict({ name: link.get("name"), content: await through(bytes, new DecompressionStream("deflate")) }, view);
  } catch { $("error").textContent = "The link is damaged."; }
}

// --- input ---

function chooseModel(model) {
  state.model = model;
  $("model").value = model.name;
  $("summary").replaceChildren(...Object.entries(model.summary).flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)]));
  $("examples").hidden = !["H", "C", "N", "O", "F"].every((element) => model.elements.includes(element));
}

async function choose(...files) {
  const { limits } = state, [file] = files;
  if (!file) return;
  if (files.length > 1) { $("error").textContent = "Choose one file; it may have several structures."; return; }
  if (!state.model) { early = file; return; }
  if (file.size > limits.bytes) { $("error").textContent = `${file.name} is larger than ${limits.bytes / 1e6} MB, the limit.`; return; }
  const view = wanted || {};
  wanted = null;
  let content;
  try { content = new Uint8Array(await file.arrayBuffer()); } catch { $("error").textContent = `${file.name} is not a file that can be read.`; return; }
  await predict({ name: file.name, content }, view);
}

async function example(numbers) {
  try {
    const texts = await Promise.all(numbers.map(async (i) => (await fetch(`api/examples/${i}`, { headers: headers() })).text()));
    await predict({ name: "qm9.xyz", content: new TextEncoder().encode(texts.join("")) });
  } catch (error) { fail(error); }
}

function connect() {
  $("model").addEventListener("change", () => { chooseModel(state.models.find((one) => one.name === $("model").value)); if (state.given) predict(state.given); });
  $("file").addEventListener("change", () => { choose(...$("file").files); $("file").value = ""; });
  $("predict").addEventListener("click", () => choose(new File([$("paste").value], "pasted.xyz")));
  $("cancel").addEventListener("click", () => running && running.abort());
  $("frame").addEventListener("input", () => select(Number($("frame").value)));
  $("color").addEventListener("change", () => { state.color = drawn.color = $("color").value; if (viewer) drawOnce(paint); updateLink(); });
  $("arrows").addEventListener("change", () => { state.arrows = $("arrows").checked; loadStructure(); updateLink(); });
  for (const button of document.querySelectorAll("[data-format]")) button.addEventListener("click", () => download(button.dataset.format));
  for (const [text, numbers] of [["C8H10O", [0]], ["C7H6N2", [4]], ["C4H2FNO2", [13]], ["two isomers, C8H10O", [0, 9]]]) $("examples").append(make("button", { type: "button", class: "button", click: () => example(numbers) }, text));
  const drop = $("drop"), over = (event) => { event.preventDefault(); drop.classList.add("over"); };
  document.addEventListener("dragover", over);
  document.addEventListener("dragleave", () => drop.classList.remove("over"));
  document.addEventListener("drop", (event) => { event.preventDefault(); drop.classList.remove("over"); choose(...event.dataTransfer.files); });
  window.addEventListener("hashchange", follow);
}

async function start() {
  if (!$("model")) return; // reports alone
  connect();
  try {
    $("status").textContent = "Loading the model …";
    const response = await fetch("api/model", { headers: headers() });
    const answer = await response.json();
    if (!response.ok) throw new Error(answer.error.message);
    Object.assign(state, { models: answer.models, limits: answer.limits });
    $("limits").textContent = `At most ${answer.limits.bytes / 1e6} MB and ${answer.limits.atoms} atoms in a structure, ${answer.limits.all_atoms} in all.`;
    $("model").replaceChildren(...answer.models.map((one) => make("option", { value: one.name }, `${one.name} (${one.target})`)));
    chooseModel(answer.models[0]);
    $("status").textContent = "";
    document.documentElement.dataset.page = "ready";
    await (early ? choose(early) : follow());
  } catch (error) { fail(error); }
}

start();
