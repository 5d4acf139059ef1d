// The text beside the mouse: about an action, and about a device at a moment.

const WORDS = {
  F: "forward", B: "backward", I: "input gradient", W: "weight gradient",
  EVICT: "leaves for the paired device", LOAD: "comes back from the paired device", SYNC: "gradients are summed",
};

function linesOf(panel, action) {
  const device = deviceOf(panel, action), kind = panel.kinds[panel.kind[action]];
  const [start, end] = [panel.start[action], panel.end[action]];
  const whose = [`stage ${panel.stage[action]}`];
  if (panel.microbatch[action] >= 0) whose.push(`microbatch ${panel.microbatch[action]}`);
  if (panel.numReplicas > 1) whose.push(`replica ${panel.replica[action]}`);
  if (panel.numChunks * panel.numReplicas > 1) whose.push(`chunk ${panel.chunk[action]}`);
  const isThin = panel.styles[panel.style[action]].isThin;
  const where = isThin ? `device ${device} with device ${partnerOf(panel, device)}` : `device ${device}`;
  const lines = [
    `${WORDS[kind]}: ${whose.join(", ")}, ${where}`,
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
  const bytes = panel.gibPerMa === null ? "" : ` (${number(sum * panel.gibPerMa)} GiB)`;
  const of = parts.length > 1 || (parts.length && !parts[0].endsWith("own stages")) ? `: ${parts.join(", ")}` : "";
  return `device ${device} stores ${number(sum)} Ma${bytes} at ${number(time)}${of}`;
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
