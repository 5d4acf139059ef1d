// What is known of the selected and of the hovered action: outline, messages and the critical path in a layer over the
// panel, and the text beside the mouse, about an action, or about a device at a moment.

function paintOverlay(panel) {
  const context = sized(panel.overlay, view.width, panel.layout.height);
  context.save();
  context.beginPath();
  context.rect(LEFT - 2, 0, plotWidth() + 4, panel.layout.height);
  context.clip();
  if (view.path) paintPath(context, panel);
  for (const chosen of [view.selected, view.hovered]) {
    if (chosen?.panel === panel && chosen.action >= 0) paintChosen(context, panel, chosen.action);
  }
  if (view.hovered?.panel === panel) {
    context.fillStyle = colours.softInk;
    context.fillRect(xOf(view.hovered.time), 0, 1, panel.layout.height);
  }
  context.restore();
}

function paintPath(context, panel) {
  const path = criticalPath(panel), points = [];
  for (const action of path) {
    if (panel.end[action] < view.from || panel.start[action] > view.to) continue;
    const box = boxOf(panel, action), edge = box.top + box.height - 1; // numbers stay readable
    points.push([box.left, edge], [box.left + box.width, edge]);
  }
  for (const [width, ink] of [[5, colours.halo], [2.2, colours.path]]) {
    context.strokeStyle = ink;
    context.lineWidth = width;
    context.lineJoin = "round";
    context.beginPath();
    points.forEach(([x, y], place) => (place ? context.lineTo(x, y) : context.moveTo(x, y)));
    context.stroke();
  }
}

function paintChosen(context, panel, action) {
  const device = deviceOf(panel, action);
  outline(context, boxOf(panel, action), colours.ink);
  const cause = panel.criticalPredecessor[action];
  if (cause >= 0 && deviceOf(panel, cause) !== device) outline(context, boxOf(panel, cause), colours.path);
  if (panel.message[action] >= 0) arrow(context, boxOf(panel, panel.message[action]), boxOf(panel, action));
  for (const reader of readersOf(panel, action)) arrow(context, boxOf(panel, action), boxOf(panel, reader));
}

// The actions that read the message of `action`.
function readersOf(panel, action) {
  if (!panel.readers) {
    panel.readers = new Map();
    panel.message.forEach((sender, reader) => {
      if (sender >= 0) panel.readers.set(sender, [...(panel.readers.get(sender) ?? []), reader]);
    });
  }
  return panel.readers.get(action) ?? [];
}

function outline(context, box, ink) {
  for (const [width, stroke] of [[5, colours.halo], [2, ink]]) {
    context.strokeStyle = stroke;
    context.lineWidth = width;
    context.strokeRect(box.left, box.top, box.width, box.height);
  }
}

function arrow(context, source, target) {
  const from = [source.left + source.width, source.top + source.height / 2];
  const to = [target.left, target.top + target.height / 2];
  if (from[1] === to[1]) return;
  const bend = Math.max((to[0] - from[0]) / 2, 10);
  for (const [width, ink] of [[4, colours.halo], [1.6, colours.ink]]) {
    context.strokeStyle = ink;
    context.fillStyle = ink;
    context.lineWidth = width;
    context.beginPath();
    context.moveTo(...from);
    context.bezierCurveTo(from[0] + bend, from[1], to[0] - bend, to[1], ...to);
    context.stroke();
    context.beginPath();
    context.moveTo(...to);
    context.lineTo(to[0] - 7, to[1] - 3.5);
    context.lineTo(to[0] - 7, to[1] + 3.5);
    context.fill();
  }
}

const WORDS = {
  F: "forward", B: "backward", I: "input gradient", W: "weight gradient",
  S: "head: statistics", T: "head: gradients", UPDATE: "update of the weights",
  TAKE: "input of a pair", PAIR: "forward and backward", PUT: "output of a pair's forward",
  EVICT: "leaves for the paired device", LOAD: "comes back from the paired device", SYNC: "gradients are summed",
};

function linesOf(panel, action) {
  const device = deviceOf(panel, action), kind = panel.kinds[panel.kind[action]];
  const [start, end] = [panel.start[action], panel.end[action]];
  const whose = [`stage ${panel.stage[action]}`];
  const what = kind === "UPDATE" ? "batch" : "microbatch";
  if (panel.microbatch[action] >= 0) whose.push(`${what} ${panel.microbatch[action]}`);
  if (panel.numReplicas > 1) whose.push(`replica ${panel.replica[action]}`);
  if (panel.numChunks * panel.numReplicas > 1) whose.push(`chunk ${panel.chunk[action]}`);
  const isThin = panel.styles[panel.style[action]].isThin;
  const other = panel.parksOnHost ? "its host" : `device ${partnerOf(panel, device)}`;
  const where = isThin ? `device ${device} with ${other}` : `device ${device}`;
  const words = panel.parksOnHost ? WORDS[kind].replace("the paired device", "the host's memory") : WORDS[kind];
  const lines = [
    `${words}: ${whose.join(", ")}, ${where}`,
    `from ${number(start)} to ${number(end)}: takes ${number(end - start)}`,
  ];
  if (panel.round) lines.push(`round ${panel.round[action]} of ${panel.numRounds}`);
  const message = panel.message[action];
  if (message >= 0 && deviceOf(panel, message) !== device) {
    const sent = `${nameOf(panel, message)} of device ${deviceOf(panel, message)}`;
    lines.push(`reads the message of ${sent}, which ended at ${number(panel.end[message])}`);
  }
  lines.push(waitOf(panel, action, device));
  return lines;
}

function waitOf(panel, action, device) {
  const cause = panel.criticalPredecessor[action], isThin = panel.styles[panel.style[action]].isThin;
  const before = previousOf(panel, action, device);
  const waited = panel.start[action] - (before < 0 ? 0 : panel.end[before]);
  if (cause < 0) return panel.start[action] > 0 ? "" : "starts at once";
  const other = deviceOf(panel, cause) === device ? "" : ` of device ${deviceOf(panel, cause)}`;
  const name = nameOf(panel, cause) + other;
  if (isThin) return `starts after ${name}`;
  if (cause === before || waited <= 1e-6 * panel.makespan) return `did not wait: ${nameOf(panel, before)} ended`;
  return `its device waited ${number(waited)} for ${name}, which ended at ${number(panel.end[cause])}`;
}

function previousOf(panel, action, device) {
  const actions = panel.rows[device].compute;
  const place = lastBefore(panel.start, actions, panel.start[action]);
  return place > 0 ? actions[place - 1] : -1;
}

function storedLine(panel, device, time) {
  const step = stepAt(panel, device, time);
  const parts = panel.stored
    .map(({ values, label }) => [step < 0 ? 0 : values[step], label])
    .filter(([value]) => value > 0)
    .map(([value, label]) => `${number(value)} ${label}`);
  const sum = step < 0 ? 0 : panel.storedTotal[step];
  const bytes = gib(panel, sum);
  const of = parts.length > 1 || (parts.length && !parts[0].endsWith("own stages")) ? `: ${parts.join(", ")}` : "";
  return `device ${device} stores ${number(sum)} Ma${bytes && ` (${bytes})`} at ${number(time)}${of}`;
}

// Why a device computes nothing at a moment: for how long it waits, and for which action.
function idleLines(panel, device, time) {
  const actions = panel.rows[device].compute, next = actions[lastBefore(panel.start, actions, time)];
  if (next === undefined) return time < panel.makespan ? ["idle: all done"] : [];
  const before = previousOf(panel, next, device), since = before < 0 ? 0 : panel.end[before];
  if (time < since) return [];
  const cause = panel.criticalPredecessor[next];
  const whose = cause < 0 ? "" : `, after ${nameOf(panel, cause)} of device ${deviceOf(panel, cause)}`;
  return [`idle from ${number(since)} to ${number(panel.start[next])}: ${nameOf(panel, next)} comes next${whose}`];
}

function tell(panel, device, action, time, x, y) {
  const box = document.getElementById("detail");
  box.replaceChildren();
  const add = (name, text) => {
    const line = document.createElement(name);
    line.textContent = text;
    box.append(line);
  };
  if (action >= 0) {
    add("b", nameOf(panel, action));
    linesOf(panel, action).filter(Boolean).forEach((line) => add("div", line));
  }
  if (action < 0) idleLines(panel, device, time).forEach((line) => add("div", line));
  if (device >= 0) add("div", storedLine(panel, device, time));
  box.hidden = false;
  const { width, height } = box.getBoundingClientRect();
  box.style.left = `${Math.max(4, x + 14 + width > innerWidth ? x - width - 14 : x + 14)}px`;
  box.style.top = `${Math.max(4, y + 18 + height > innerHeight ? y - height - 12 : y + 18)}px`;
}

function tellNothing() {
  document.getElementById("detail").hidden = true;
}
