// Places of a panel's tracks, in pixels: for each device its actions, its transfers, its memory.

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
