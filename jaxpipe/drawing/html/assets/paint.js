// The tracks of actions and transfers, and of what a device stores over time. Where actions are too narrow to be
// distinguished, the colour of a column of pixels is the mean of what runs in it: a schedule of 10^5 actions is drawn at
// once, and idle time stays visible. Stored are own, parked and travelling activations, one upon the other, below the
// bound.

const NARROW = 3; // pixels of the mean action: below it columns are drawn
const SHARP = 12; // pixels: wider neighbours have a gap between them
const mixer = document.createElement("canvas");

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function rgbOf(text) {
  return [1, 3, 5].map((place) => Number.parseInt(text.slice(place, place + 2), 16));
}

function sized(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [across, down] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== across || canvas.height !== down) {
    [canvas.width, canvas.height] = [across, down];
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

function paintTrack(context, panel, device) {
  const track = panel.layout.tracks[device], { compute, thin } = panel.rows[device];
  const right = xOf(Math.min(panel.makespan, view.to));
  context.fillStyle = colours.track;
  if (right > LEFT) {
    context.fillRect(LEFT, track.top, right - LEFT, track.compute);
    if (track.thin) context.fillRect(LEFT, track.thinTop, right - LEFT, track.thin);
  }
  const begin = firstAfter(panel.end, compute, view.from), stop = lastBefore(panel.start, compute, view.to);
  const seen = Math.min(view.to, panel.makespan) - view.from;
  const meanWidth = (plotWidth() * seen) / (view.to - view.from) / Math.max(stop - begin, 1);
  if (meanWidth < NARROW) paintColumns(context, panel, track, compute, begin, stop);
  else paintActions(context, panel, track, compute, begin, stop);
  paintThin(context, panel, track, thin);
  if (panel.round && meanWidth >= NARROW) paintRounds(context, panel, device, track);
}

// The first place in `actions` whose action starts at `time` or later.
function lastBefore(starts, actions, time) {
  let low = 0, high = actions.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (starts[actions[middle]] >= time) high = middle;
    else low = middle + 1;
  }
  return low;
}

function paintActions(context, panel, track, actions, begin, stop) {
  context.textAlign = "center";
  context.textBaseline = "middle";
  const size = Math.min(11, track.compute - 2);
  context.font = `${size}px Helvetica, Arial, sans-serif`;
  for (let place = begin; place < stop; place++) {
    const action = actions[place], style = panel.styles[panel.style[action]];
    const left = Math.max(xOf(panel.start[action]), LEFT), right = Math.min(xOf(panel.end[action]), LEFT + plotWidth());
    const gap = right - left >= SHARP ? 1 : right - left > NARROW ? 0.5 : 0;
    context.fillStyle = style.fill;
    context.fillRect(left, track.top, Math.max(right - left - gap, 0.5), track.compute);
    const label = String(panel.microbatch[action]);
    if (right - left >= label.length * 0.6 * size + 3 && size >= 7) {
      context.fillStyle = style.ink;
      context.fillText(label, (left + right) / 2, track.top + track.compute / 2 + 0.5);
    }
  }
}

function paintColumns(context, panel, track, actions, begin, stop) {
  const ratio = window.devicePixelRatio || 1;
  const width = Math.max(Math.round(plotWidth() * ratio), 1), perTime = width / (view.to - view.from);
  const sums = new Float32Array(4 * width); // red, green, blue, part of the column that is busy
  for (let place = begin; place < stop; place++) {
    const action = actions[place], [red, green, blue] = panel.styles[panel.style[action]].rgb;
    const left = Math.max((panel.start[action] - view.from) * perTime, 0);
    const right = Math.min((panel.end[action] - view.from) * perTime, width);
    for (let column = Math.floor(left); column < right; column++) {
      const part = Math.min(right, column + 1) - Math.max(left, column);
      sums[4 * column] += part * red;
      sums[4 * column + 1] += part * green;
      sums[4 * column + 2] += part * blue;
      sums[4 * column + 3] += part;
    }
  }
  const pixels = new ImageData(width, 1);
  for (let place = 0; place < 4 * width; place += 4) {
    const busy = Math.min(sums[place + 3], 1);
    if (busy <= 0) continue;
    for (let part = 0; part < 3; part++) pixels.data[place + part] = sums[place + part] / sums[place + 3];
    pixels.data[place + 3] = 255 * busy; // the track shows through where the device is idle
  }
  [mixer.width, mixer.height] = [width, 1];
  mixer.getContext("2d").putImageData(pixels, 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(mixer, 0, 0, width, 1, LEFT, track.top, plotWidth(), track.compute);
}

function paintThin(context, panel, track, thin) {
  let drawn = -1, drawnStyle = -1;
  for (const action of thin) {
    if (panel.start[action] > view.to) break;
    if (panel.end[action] < view.from) continue;
    const left = Math.max(xOf(panel.start[action]), LEFT);
    const right = Math.min(Math.max(xOf(panel.end[action]), left + 2), LEFT + plotWidth());
    if (right <= drawn && panel.style[action] === drawnStyle) continue;
    [drawn, drawnStyle] = [right, panel.style[action]];
    context.fillStyle = panel.styles[drawnStyle].fill;
    context.fillRect(left, track.thinTop, Math.max(right - left - (right - left > SHARP ? 1 : 0), 1), track.thin);
  }
}

// Where rounds begin: notches in the lower edge of the track.
function paintRounds(context, panel, device, track) {
  context.fillStyle = colours.ink;
  const notch = Math.max(track.compute / 5, 2);
  for (let round = 1; round < panel.numRounds; round++) {
    const time = panel.roundStart[round * panel.numDevices + device];
    if (time < view.from || time > view.to) continue;
    context.fillRect(xOf(time) - 0.5, track.top + track.compute - notch, 1, notch + 1);
  }
}

function paintNames(context, panel, device) {
  const track = panel.layout.tracks[device], size = Math.min(12, track.bottom - track.top);
  context.textBaseline = "middle";
  context.font = `${size}px Helvetica, Arial, sans-serif`;
  context.fillStyle = colours.ink;
  context.textAlign = "right";
  const middle = track.top + track.compute / 2;
  context.fillText(panel.numDevices > 16 ? String(device) : `device ${device}`, LEFT - 8, middle);
  context.fillStyle = colours.softInk;
  context.textAlign = "left";
  context.fillText(`${Math.round(100 * panel.busy[device])} %`, LEFT + plotWidth() + 6, middle);
}

// For each device, the fraction of the makespan in which it computes.
function busyOf(panel) {
  return panel.rows.map(({ compute }) => {
    let sum = 0;
    for (const action of compute) sum += panel.end[action] - panel.start[action];
    return sum / (panel.makespan || 1);
  });
}

function paintAxis(canvas) {
  const context = sized(canvas, view.width, 22), end = LEFT + plotWidth();
  context.fillStyle = colours.softInk;
  context.font = "11px Helvetica, Arial, sans-serif";
  context.textBaseline = "middle";
  const step = roundStep((view.to - view.from) / Math.max(plotWidth() / 90, 1));
  for (let count = Math.ceil(view.from / step - 1e-9); count * step <= view.to * (1 + 1e-12); count++) {
    const x = xOf(count * step);
    context.fillRect(x, 16, 1, 6);
    context.textAlign = x > end - 20 ? "right" : "center";
    context.fillText(number(count * step), x, 8);
  }
  context.textAlign = "right";
  context.fillText("time", LEFT - 24, 8);
  context.textAlign = "left";
  context.fillText("busy", end + 16, 8);
  return step;
}

// The least of 1, 2, 5, 10, ... that is at least `step`.
function roundStep(step) {
  const power = 10 ** Math.floor(Math.log10(step));
  return [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= step * (1 - 1e-9));
}

const AIR = 1.1; // height of a track / the most that is stored

// The index of the device's step of memory at `time`; -1 before the first.
function stepAt(panel, device, time) {
  let low = panel.storedFirst[device], high = panel.storedFirst[device + 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (panel.storedTime[middle] > time) high = middle;
    else low = middle + 1;
  }
  return low > panel.storedFirst[device] ? low - 1 : -1;
}

function mostStored(panel) {
  return panel.storedTotal.reduce((most, total) => Math.max(most, total), 0);
}

// For each column of pixels, the step at which most is stored: no peak is lost, however far one zooms out.
function stepsOfColumns(panel, device) {
  const width = Math.ceil(plotWidth()), steps = new Int32Array(width).fill(-1);
  const last = panel.storedFirst[device + 1];
  const perColumn = (view.to - view.from) / plotWidth();
  let step = stepAt(panel, device, view.from);
  for (let column = 0; column < width; column++) {
    const until = view.from + (column + 1) * perColumn;
    let highest = step;
    let next = step < 0 ? panel.storedFirst[device] : step + 1;
    for (; next < last && panel.storedTime[next] < until; next++) {
      if (highest < 0 || panel.storedTotal[next] > panel.storedTotal[highest]) highest = next;
      step = next;
    }
    steps[column] = highest;
  }
  return steps;
}

function paintStored(context, panel, device) {
  const track = panel.layout.tracks[device];
  if (!track.memory) return;
  const perMa = track.memory / (AIR * panel.most), right = xOf(Math.min(panel.makespan, view.to));
  context.fillStyle = colours.store;
  if (right > LEFT) context.fillRect(LEFT, track.memoryTop, right - LEFT, track.memory);
  const steps = stepsOfColumns(panel, device), base = new Float32Array(steps.length);
  for (const { values, fill } of panel.stored) {
    context.fillStyle = fill;
    const amount = (column) => (steps[column] < 0 ? 0 : values[steps[column]]);
    for (let from = 0, column = 1; column <= steps.length; column++) {
      const isSame = column < steps.length && amount(column) === amount(from) && base[column] === base[from];
      if (isSame) continue;
      const height = amount(from) * perMa;
      if (height > 0) {
        context.fillRect(LEFT + from, track.bottom - base[from] - height, column - from, height);
        base.fill(base[from] + height, from, column);
      }
      from = column;
    }
  }
  if (panel.bound !== null) {
    context.strokeStyle = track.memory < 20 ? colours.softInk : colours.ink;
    context.setLineDash([4, 3]);
    context.lineWidth = track.memory < 20 ? 0.5 : 1;
    context.beginPath();
    const height = Math.round(track.bottom - panel.bound * perMa) + 0.5;
    context.moveTo(LEFT, height);
    context.lineTo(Math.max(right, LEFT), height);
    context.stroke();
    context.setLineDash([]);
  }
  if (track.memory >= 16) {
    context.fillStyle = colours.softInk;
    context.font = "10px Helvetica, Arial, sans-serif";
    context.textAlign = "left";
    context.textBaseline = "middle";
    const peak = panel.peaks[device];
    context.fillText(gib(panel, peak) || `${number(peak)} Ma`, LEFT + plotWidth() + 6, track.bottom - track.memory / 2);
  }
}

function peaksOf(panel) {
  return Array.from({ length: panel.numDevices }, (_, device) =>
    panel.storedTotal
      .subarray(panel.storedFirst[device], panel.storedFirst[device + 1])
      .reduce((most, total) => Math.max(most, total), 0),
  );
}
