// Where the lanes of a panel stand, in pixels: of each device its actions, its transfers, its memory.

const WISHED = { compute: 520, memory: 620 }; // height of all lanes of a kind together
const LANE = { compute: [12, 24], memory: [12, 34] }; // of one: at least, at most
const THIN = 0.5; // height of a lane of transfers, of a lane of actions

function lanesOf(panel) {
  const height = (part) =>
    Math.round(Math.min(Math.max(WISHED[part] / panel.numDevices, LANE[part][0]), LANE[part][1]));
  const compute = height("compute"), thin = Math.max(Math.round(THIN * compute), 5);
  const memory = view.memory ? height("memory") : 0;
  const gap = panel.numDevices > 16 ? 4 : 6;
  const lanes = [];
  let top = 2;
  for (let device = 0; device < panel.numDevices; device++) {
    const lane = { top, compute, moves: panel.hasMoves[device] ? thin : 0, memory };
    lane.movesTop = top + compute + 1;
    lane.memoryTop = lane.movesTop + (lane.moves ? lane.moves + 1 : 0);
    lane.bottom = lane.memoryTop + memory;
    lanes.push(lane);
    top = lane.bottom + gap;
  }
  return { lanes, height: top };
}

function deviceAt(panel, y) {
  return panel.layout.lanes.findIndex((lane) => y >= lane.top - 1 && y <= lane.bottom + 1);
}

// The action under a point of the panel, -1 where there is none; a mark of no width is hit a little beside it.
function actionAt(panel, device, x, y) {
  const lane = panel.layout.lanes[device];
  const isMove = lane.moves > 0 && y >= lane.movesTop && y < lane.memoryTop;
  if (!isMove && y >= lane.movesTop) return -1;
  const actions = isMove ? panel.rows[device].moves : panel.rows[device].compute;
  const reach = isMove ? 4 : 0;
  const [early, late] = [timeAt(x - reach), timeAt(x + reach)];
  let found = -1;
  for (let place = isMove ? 0 : firstAfter(panel.end, actions, early); place < actions.length; place++) {
    const action = actions[place];
    if (panel.start[action] > late) break;
    if (panel.end[action] >= early) found = action;
  }
  return found;
}

function boxOf(panel, action) {
  const lane = panel.layout.lanes[deviceOf(panel, action)];
  const isMove = panel.styles[panel.style[action]].isMove;
  const left = xOf(panel.start[action]);
  return {
    left,
    width: Math.max(xOf(panel.end[action]) - left, isMove ? 2 : 0.5),
    top: isMove ? lane.movesTop : lane.top,
    height: isMove ? lane.moves : lane.compute,
  };
}
