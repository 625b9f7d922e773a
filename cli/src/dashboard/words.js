// Numbers, times and states in words, and small helpers for the page's elements.

export const thousands = (number) => Number(number).toLocaleString('en-US');

export const count = (number, one, many = `${one}s`) =>
  `${thousands(number)} ${number === 1 ? one : many}`;

// As in headgatectl: 740ms, 4.2s, 3m12s, 5h03m, 12d4h.
export function duration(ms) {
  const seconds = Math.floor(ms / 1000);
  const pad = (number) => String(number).padStart(2, '0');
  if (ms < 1000) return ms < 1 ? '< 1 ms' : `${Math.round(ms)} ms`;
  if (ms < 10_000) return `${(Math.floor(ms / 100) / 10).toFixed(1)} s`;
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)}m${pad(seconds % 60)}s`;
  if (seconds < 86_400) return `${Math.floor(seconds / 3600)}h${pad(Math.floor(seconds / 60) % 60)}m`;
  return `${Math.floor(seconds / 86_400)}d${Math.floor(seconds / 3600) % 24}h`;
}

export const clock = (unixMs) => new Date(unixMs).toTimeString().slice(0, 8);

// The states of a Node, the worst first: letter on the map, class, words, and what to do.
const state = (letter, look, words, remedy) => ({ letter, look, words, remedy });
export const STATES = {
  failing: state('F', 'bad', 'failing',
    'The agent tries again by itself. Read the error, then the agent’s log on this Node.'),
  rejecting: state('R', 'bad', 'rejecting',
    'The last good rules stay. The card names the objects: correct them, or load what the kernel lacks.'),
  drift: state('D', 'bad', 'drift',
    'The agent repairs what differs. Find out what changed the kernel, and verify this Node again.'),
  no_agent: state('×', 'gone', 'no agent',
    'Start the agent of this Node; its rules stand still until then.'),
  cut_off: state('C', 'gone', 'cut off',
    'Its replica does not hear from the API server: see Replicas.'),
  waiting: state('W', 'gone', 'waiting',
    'It has acknowledged nothing yet. If that lasts, look at its replica.'),
  standby: state('S', 'gone', 'standby',
    'Another service proxy works on this Node, and Headgate writes nothing. It takes over by itself '
    + 'once the other proxy has gone.'),
  behind: state('B', 'warn', 'behind',
    'Look at the Node’s CPU, and at what else holds the lock of its rules.'),
  degraded: state('d', 'warn', 'degraded', 'The reason names the remedy.'),
  well: state('', 'well', 'up to date', ''),
};
export const ORDER = Object.keys(STATES);
const EXCEPTION_WORDS = {
  no_agent: 'without an agent', drift: 'with drift', rejecting: 'rejecting a Service',
  cut_off: 'at a replica that is cut off', standby: 'in standby',
};
export const exception = (name) => EXCEPTION_WORDS[name] ?? STATES[name].words;

// Creates an element. Properties whose names begin with "on" are listeners.
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === false) continue;
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? '' : value);
  }
  element.append(...kids(children));
  return element;
}

// Leaves out what a condition has left out.
export const kids = (children) =>
  children.flat(Infinity).filter((child) => child !== undefined && child !== '' && child !== false);

export const $ = (id) => document.getElementById(id);

// Sets a text only if it differs, so that a screen reader speaks each text once.
export function say(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

// Replaces the children of an element if what they show has changed. The focus stays on the
// element with the same `data-key`.
const shown = new WeakMap();
export function fill(element, what, children) {
  const key = JSON.stringify(what);
  if (shown.get(element) === key) return;
  shown.set(element, key);
  const focused = element.contains(document.activeElement) && document.activeElement.dataset.key;
  element.replaceChildren(...kids(children()));
  if (focused) element.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
}

export const mark = (name) =>
  h('span', { class: `mark ${STATES[name].look}`, 'aria-hidden': 'true' }, STATES[name].letter);

// A mark for what is no state of a Node.
export const sign = (look) => h('span', { class: `mark ${look}`, 'aria-hidden': 'true' }, '!');

// A bar, whose length is a share of this number of pixels.
export function bar(share, pixels) {
  const element = h('i', {});
  element.style.width = `${Math.max(3, Math.round(share * pixels))}px`;
  return element;
}

export const stateWords = (name) => h('span', { class: 'state' }, mark(name), STATES[name].words);

export function table(heads, rows, label) {
  const head = heads.map((text) =>
    h('th', { scope: 'col', class: text.startsWith('>') ? 'number' : undefined },
      text.replace('>', '')));
  return h('table', { 'aria-label': label }, h('thead', {}, h('tr', {}, head)), h('tbody', {}, rows));
}

export const empty = (text) => h('p', { class: 'empty' }, text);

export const link = (key, text, onclick) =>
  h('button', { type: 'button', class: 'plain', 'data-key': key, onclick }, text);

export const facts = (pairs) =>
  h('dl', { class: 'card' }, pairs.filter(([, value]) => value !== undefined && value !== '')
    .map(([name, value]) => [h('dt', {}, name), h('dd', {}, value)]));
