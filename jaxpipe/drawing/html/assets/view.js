// The visible range of time and its form in the address; the place of a moment on the screen, and places of a panel's
// tracks, in pixels: for each device its actions, its transfers, its memory.

const LEFT = 76; // pixels before the tracks, for names
const RIGHT = 52; // pixels behind them, for how busy a device is
const LEAST_SPAN = 1e-5; // of the longest makespan: the deepest zoom

const view = {
  from: 0,
  to: 1,
  longest: 1,
  width: 0, // of a canvas, pixels
  clock: "",
  memory: true,
  path: false,
  selected: null, // { panel, action }
  hovered: null, // { panel, action, device, time }
};

function plotWidth() {
  return Math.max(view.width - LEFT - RIGHT, 50);
}

function xOf(time) {
  return LEFT + ((time - view.from) / (view.to - view.from)) * plotWidth();
}

function timeAt(x) {
  return view.from + ((x - LEFT) / plotWidth()) * (view.to - view.from);
}

// The longest makespan on the chosen clocks.
function wholeOf(panels) {
  return Math.max(...panels.filter(isShown).map((panel) => panel.makespan)) || 1;
}

// Sets the visible range; zoom and pan never leave the schedule, and never reverse it.
function show(from, to) {
  const span = Math.min(Math.max(to - from, view.longest * LEAST_SPAN), view.longest);
  view.from = Math.min(Math.max(from, 0), view.longest - span);
  view.to = view.from + span;
}

function zoom(factor, time = (view.from + view.to) / 2) {
  show(time - (time - view.from) * factor, time + (view.to - time) * factor);
}

function pan(fraction) {
  const step = fraction * (view.to - view.from);
  show(view.from + step, view.to + step);
}

function number(value) {
  return String(Number(value.toPrecision(6)));
}

// GiB of so many Ma, where the bytes of a slot are known.
function gib(panel, ma) {
  return panel.gibPerMa === null ? "" : `${Number((ma * panel.gibPerMa).toPrecision(3))} GiB`;
}

function readAddress(panels) {
  const words = new URLSearchParams(location.hash.slice(1));
  const time = (name, otherwise) => {
    const value = Number.parseFloat(words.get(name));
    return Number.isFinite(value) ? value : otherwise;
  };
  const clocks = [...new Set(panels.map((panel) => panel.clock))];
  view.clock = [...clocks, "both"].includes(words.get("clock")) ? words.get("clock") : clocks[0];
  view.memory = words.get("memory") !== "0";
  view.path = words.get("path") === "1";
  show(0, wholeOf(panels));
  const [from, to] = [time("from", view.from), time("to", view.to)];
  if (from < to) show(from, to);
  const [index, name] = (words.get("select") ?? "").split(":");
  view.selected = null;
  if (name) {
    const panel = panels.find((each) => String(each.index) === index && isShown(each));
    const action = panel ? actionNamed(panel, name) : -1;
    if (action >= 0) view.selected = { panel, action };
  }
}

function writeAddress(panels) {
  const words = [];
  if (view.from > 0 || view.to !== wholeOf(panels)) words.push(`from=${number(view.from)}`, `to=${number(view.to)}`);
  words.push(`clock=${view.clock}`);
  if (!view.memory) words.push("memory=0");
  if (view.path) words.push("path=1");
  if (view.selected) {
    words.push(`select=${view.selected.panel.index}:${nameOf(view.selected.panel, view.selected.action)}`);
  }
  try {
    history.replaceState(null, "", `#${words.join("&")}`);
  } catch {
    // A page inside another one, as in a notebook, may have no address of its own.
  }
}

function isShown(panel) {
  return view.clock === "both" || panel.clock === view.clock;
}

const WISHED = { compute: 520, memory: 620 }; // height of all tracks of a kind together
const HEIGHT = { compute: [12, 24], memory: [12, 34] }; // of one track: at least, at most
const THIN = 0.5; // height of a track of transfers / that of a track of actions

function tracksOf(panel) {
  const height = (part) =>
    Math.round(Math.min(Math.max(WISHED[part] / panel.numDevices, HEIGHT[part][0]), HEIGHT[part][1]));
  const compute = height("compute"), thin = Math.max(Math.round(THIN * compute), 5);
  const memory = view.memory ? height("memory") : 0;
  const gap = panel.numDevices > 16 ? 4 : 6;
  const tracks = [];
  let top = 2;
  for (let device = 0; device < panel.numDevices; device++) {
    const track = { top, compute, thin: panel.hasThin[device] ? thin : 0, memory };
    track.thinTop = top + compute + 1;
    track.memoryTop = track.thinTop + (track.thin ? track.thin + 1 : 0);
    track.bottom = track.memoryTop + memory;
    tracks.push(track);
    top = track.bottom + gap;
  }
  return { tracks, height: top };
}

function deviceAt(panel, y) {
  return panel.layout.tracks.findIndex((track) => y >= track.top - 1 && y <= track.bottom + 1);
}

// The action under a point of the panel, -1 where there is none; a mark of no width is hit a little beside it.
function actionAt(panel, device, x, y) {
  const track = panel.layout.tracks[device];
  const isThin = track.thin > 0 && y >= track.thinTop && y < track.memoryTop;
  if (!isThin && y >= track.thinTop) return -1;
  const actions = isThin ? panel.rows[device].thin : panel.rows[device].compute;
  const reach = isThin ? 4 : 0;
  const [early, late] = [timeAt(x - reach), timeAt(x + reach)];
  let found = -1;
  for (let place = isThin ? 0 : firstAfter(panel.end, actions, early); place < actions.length; place++) {
    const action = actions[place];
    if (panel.start[action] > late) break;
    if (panel.end[action] >= early) found = action;
  }
  return found;
}

function boxOf(panel, action) {
  const track = panel.layout.tracks[deviceOf(panel, action)];
  const isThin = panel.styles[panel.style[action]].isThin;
  const left = xOf(panel.start[action]);
  return {
    left,
    width: Math.max(xOf(panel.end[action]) - left, isThin ? 2 : 0.5),
    top: isThin ? track.thinTop : track.top,
    height: isThin ? track.thin : track.compute,
  };
}
