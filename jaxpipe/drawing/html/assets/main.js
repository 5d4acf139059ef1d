// Reads the page's data, a line of JSON, then its arrays, compressed: see `_packed` in pack.py; and starts the page.
// After a change of the view it draws what is on the screen, once a frame.

async function readPanels() {
  const [head, packed] = document.getElementById("data").textContent.split("\n");
  const values = JSON.parse(head);
  const bytes = Uint8Array.from(atob(packed.trim()), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer();
  for (const panel of values.panels) {
    for (const [key, value] of Object.entries(panel)) {
      if (Array.isArray(value) && (value[0] === "int32" || value[0] === "float32")) {
        const View = value[0] === "int32" ? Int32Array : Float32Array;
        panel[key] = new View(buffer, 4 * value[1], value[2]);
      }
    }
    panel.kinds = values.kinds;
    panel.stored = values.stored.map((part) => ({ ...part, values: panel[`stored_${part.part}`] }));
    const totalAt = (step) => panel.stored.reduce((sum, part) => sum + part.values[step], 0);
    panel.storedTotal = panel.storedTime.map((_, step) => totalAt(step));
    panel.rows = Array.from({ length: panel.numDevices }, (_, device) => rowOf(panel, device));
    panel.hasThin = panel.rows.map((row) => row.thin.length > 0);
  }
  return values.panels;
}

// The actions of a device: those of its track and those of its thin track, each by time of start.
function rowOf(panel, device) {
  const compute = [], thin = [];
  for (let action = panel.first[device]; action < panel.first[device + 1]; action++) {
    (panel.styles[panel.style[action]].isThin ? thin : compute).push(action);
  }
  thin.sort((one, other) => panel.start[one] - panel.start[other]);
  return { compute, thin };
}

// The first place in `actions` whose action ends after `time`; they do not overlap, or only in a thin track.
function firstAfter(ends, actions, time) {
  let low = 0, high = actions.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ends[actions[middle]] > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

function deviceOf(panel, action) {
  let low = 0, high = panel.numDevices;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (panel.first[middle] <= action) low = middle;
    else high = middle;
  }
  return low;
}

function partnerOf(panel, device) {
  return panel.numDevices - 1 - device;
}

// An action as schedules write it: 2F0, 3B11@1, 0EVICT4, 3SYNC@1.
function nameOf(panel, action) {
  const microbatch = panel.microbatch[action] < 0 ? "" : panel.microbatch[action];
  const replica = panel.replica[action] ? `@${panel.replica[action]}` : "";
  return `${panel.stage[action]}${panel.kinds[panel.kind[action]]}${microbatch}${replica}`;
}

function actionNamed(panel, name) {
  for (let action = 0; action < panel.kind.length; action++) {
    if (nameOf(panel, action) === name) return action;
  }
  return -1;
}

// The chain of critical predecessors from the last F, B, I or W back to the first.
function criticalPath(panel) {
  if (!panel.path) {
    let last = -1;
    for (const { compute } of panel.rows) {
      const action = compute.at(-1);
      if (action !== undefined && (last < 0 || panel.end[action] > panel.end[last])) last = action;
    }
    panel.path = [];
    for (; last >= 0; last = panel.criticalPredecessor[last]) panel.path.push(last);
    panel.path.reverse();
  }
  return panel.path;
}

let allPanels = [];
let isDue = false;

function changed() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    draw();
  });
}

function draw() {
  readColours();
  view.width = document.getElementById("panels").clientWidth - 32;
  document.getElementById("clock").value = view.clock;
  document.getElementById("memory").checked = view.memory;
  document.getElementById("path").checked = view.path;
  document.getElementById("range").textContent = `time ${number(view.from)} to ${number(view.to)}`;
  paintAxis(document.getElementById("axis"));
  for (const panel of allPanels) {
    panel.section.hidden = !isShown(panel);
    panel.layout = tracksOf(panel);
    panel.stack.style.height = `${panel.layout.height}px`;
  }
  paintVisible();
  tellSelected();
  writeAddress(allPanels);
}

function paintVisible() {
  for (const panel of allPanels) {
    if (!isShown(panel)) continue;
    const { top, bottom } = panel.section.getBoundingClientRect();
    if (bottom > -MARGIN && top < innerHeight + MARGIN) paintPanel(panel);
  }
}

function failed(message) {
  document.body.prepend(element("p", { id: "error", role: "alert" }, `This page could not be drawn: ${message}`));
}

addEventListener("error", (event) => failed(event.message));
addEventListener("unhandledrejection", (event) => failed(event.reason));

readPanels().then((panels) => {
  allPanels = panels;
  view.longest = Math.max(...panels.map((panel) => panel.makespan)) || 1;
  const most = Math.max(...panels.map(mostStored), ...panels.map((panel) => panel.bound ?? 0)) || 1;
  panels.forEach((panel) => {
    panel.most = most;
    addPanel(panel);
  });
  readAddress(panels);
  addControls(panels);
  draw();
  document.documentElement.dataset.state = "drawn";
});
