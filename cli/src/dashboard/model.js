// What the page knows: the stream from headgatectl, and questions to it.

const given = new URLSearchParams(location.search).get('token');
if (given) {
  // The token leaves the address bar and the history. A reload finds it in the tab's own storage.
  sessionStorage.setItem('token', given);
  history.replaceState(null, '', location.pathname);
}
const token = sessionStorage.getItem('token') ?? '';

export const model = {
  link: { up: false, server: '', problem: '', at: Date.now() },
  status: {},
  nodes: new Map(),
  // The changes by version, the oldest first.
  changes: new Map(),
  leftOut: 0,
  isComplete: false,
};
// At most this number of changes is kept.
const KEPT = 512;

export async function ask(path, body) {
  const headers = { Authorization: `Bearer ${token}` };
  const options = body === undefined ? { headers } :
    { headers: { ...headers, 'Content-Type': 'application/json' }, method: 'POST', body: JSON.stringify(body) };
  const response = await fetch(`/api/${path}`, { cache: 'no-store', ...options });
  if (response.ok) return response.json();
  const text = await response.text();
  throw Object.assign(new Error(text || `headgatectl answered ${response.status}`), { status: response.status });
}

// A row has the fields name, zone, pool, mode, agent's version, replica, time of the last
// verification, state, and further facts if it is not well.
function node(row) {
  const [name, zone, pool, mode, version, replica, verified, state, more = {}] = row;
  return { name, zone, pool, mode, version, replica, verified, state, ...more };
}

function change(row) {
  const [version, at, service, endpoint, changed, trigger, took, nodes, missing, state, slowest, reason] = row;
  return { version, at, service, endpoint, changed, trigger, took, nodes, missing, state, slowest, reason };
}

// The groups of Nodes stay as they are if only the state of a Node changes.
function put(row) {
  const fresh = node(row), known = model.nodes.get(fresh.name);
  if (known?.zone === fresh.zone && known.pool === fresh.pool) {
    for (const key of Object.keys(known)) delete known[key];
    Object.assign(known, fresh);
  } else {
    model.nodes.set(fresh.name, fresh);
    model.grouping = undefined;
  }
}

const apply = {
  link(message) { model.link = message; },
  status(message) { Object.assign(model.status, message.s, { now: message.now }); },
  nodes(message) {
    if (message.all) model.nodes.clear();
    message.set.forEach(put);
    for (const name of message.gone ?? []) if (model.nodes.delete(name)) model.grouping = undefined;
    model.isComplete = message.complete ?? model.isComplete;
  },
  times(message) {
    model.leftOut += message.left_out ?? 0;
    for (const row of message.list) {
      model.changes.delete(row[0]);
      model.changes.set(row[0], change(row));
    }
    for (const version of model.changes.keys()) {
      if (model.changes.size <= KEPT) break;
      model.changes.delete(version);
    }
  },
};

// The Nodes of each zone and pool, in order of name.
export function grouping() {
  if (model.grouping) return model.grouping;
  const byName = new Intl.Collator('en', { numeric: true }).compare;
  const groups = new Map();
  for (const one of model.nodes.values()) {
    const key = `${one.zone}\n${one.pool}`;
    if (!groups.has(key)) groups.set(key, { zone: one.zone, pool: one.pool, nodes: [] });
    groups.get(key).nodes.push(one);
  }
  model.grouping = [...groups.values()]
    .sort((a, b) => byName(a.zone, b.zone) || byName(a.pool, b.pool));
  for (const group of model.grouping) group.nodes.sort((a, b) => byName(a.name, b.name));
  return model.grouping;
}

// Reads the stream until the page closes. `changed` gets the kind of each message.
export async function follow(changed) {
  for (let pause = 500; ; pause = Math.min(pause * 2, 10_000)) {
    let problem = 'headgatectl has ended: start it again, and open its new URL';
    try {
      const headers = { Authorization: `Bearer ${token}` };
      const response = await fetch('/api/stream', { headers, cache: 'no-store' });
      if (response.status === 401) problem = 'this address lacks its token: open the URL that headgatectl printed';
      if (response.ok) {
        pause = 500;
        await read(response.body, changed);
      }
    } catch { /* The connection broke; the text above says what to do. */ }
    model.link = { ...model.link, up: false, problem, at: Date.now() };
    changed('link');
    await new Promise((done) => setTimeout(done, pause));
  }
}

async function read(body, changed) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let held = ''; ;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (held + value).split('\n');
    held = lines.pop();
    for (const line of lines.filter(Boolean)) {
      const message = JSON.parse(line);
      apply[message.t]?.(message);
      changed(message.t);
    }
  }
}
