// What a device stores over time: own, parked and travelling activations, one upon the other, and the bound.

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
    context.fillText(`${number(panel.peaks[device])} Ma`, LEFT + plotWidth() + 6, track.bottom - track.memory / 2);
  }
}

function peaksOf(panel) {
  return Array.from({ length: panel.numDevices }, (_, device) =>
    panel.storedTotal
      .subarray(panel.storedFirst[device], panel.storedFirst[device + 1])
      .reduce((most, total) => Math.max(most, total), 0),
  );
}
