// The Services as a table that loads only the rows in view, and one Service followed to the Nodes.
import { answer, run } from './ask.js';
import { filter } from './map.js';
import { ask, model } from './model.js';
import { openDrawer } from './drawer.js';
import { $, count, empty, facts, fill, h, kids, link, mark, say, table, thousands } from './words.js';

const ROW = 31, PAGE = 40;
let query = '', rows = new Map(), total = 0, generation = 0, isVisible = false, openService = () => {};
const pages = new Set();

const ports = (service) => service.ports.map(({ port, node_port: nodePort, protocol }) =>
  `${port}${nodePort ? `:${nodePort}` : ''}/${protocol}`).join(' ');

function reload() {
  const search = $('services-search').value.trim(), only = $('services-only').value;
  query = `search=${encodeURIComponent(search)}&only=${only}`;
  $('services-list').scrollTop = 0;
  refresh();
}

// The table loads when it comes into view, or when the replica answers, and not again while it is
// out of view.
export function loadInView() {
  if (isVisible && model.link.up && rows.size === 0) reload();
}

export function start(open) {
  openService = open;
  let typing;
  $('services-search').addEventListener('input', () => { clearTimeout(typing); typing = setTimeout(reload, 60); });
  $('services-only').addEventListener('change', reload);
  $('services-list').addEventListener('scroll', () => requestAnimationFrame(show), { passive: true });
  new IntersectionObserver(([entry]) => {
    isVisible = entry.isIntersecting;
    loadInView();
  }).observe($('services'));
  setInterval(() => { if (isVisible && model.link.up && !document.hidden) refresh(true); }, 30_000);
}

export function only(which) {
  $('services-only').value = which;
  $('services-only').dispatchEvent(new Event('change'));
  $('services').scrollIntoView();
  $('services-list').focus({ preventScroll: true });
}

function refresh(keeps) {
  generation += 1;
  pages.clear();
  if (!keeps) rows = new Map();
  show();
}

async function load(page) {
  if (pages.has(page)) return;
  pages.add(page);
  const own = generation;
  try {
    const found = await ask(`services?${query}&offset=${page * PAGE}&limit=${PAGE}`);
    if (own !== generation) return;
    total = found.total;
    found.services.forEach((service, index) => rows.set(page * PAGE + index, service));
    say('services-count', `${thousands(total)}${total === found.all ? '' : ` of ${thousands(found.all)}`}`);
    show();
  } catch (error) {
    if (own !== generation) return;
    pages.delete(page);
    fill($('services-list'), error.message, () => [empty(error.message)]);
  }
}

function show() {
  const list = $('services-list');
  list.style.height = `${Math.min(424, 34 + Math.max(total, 3) * ROW)}px`;
  const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 8);
  const last = Math.max(first + 1, Math.min(first + Math.ceil(list.clientHeight / ROW) + 16, total || PAGE));
  for (let page = Math.floor(first / PAGE); page <= Math.floor((last - 1) / PAGE); page += 1) load(page);
  const numbers = Array.from({ length: Math.max(0, last - first) }, (_, index) => first + index).filter((at) => at < total);
  const shown = numbers.map((at) => [at, rows.get(at)]);
  if (total === 0) return fill(list, [query, 'none'], () => [empty(rows.size || pages.size ? 'None' : 'No Service matches')]);
  return fill(list, [first, total, shown], () => {
    const gap = (height) => {
      const cell = h('td', { colspan: 6 });
      cell.style.height = `${height}px`;
      return h('tr', { class: 'gap', 'aria-hidden': 'true' }, cell);
    };
    const one = table(['Service', 'Address', 'Ports', '>Ready', 'Policy', 'Fault'],
      [gap(first * ROW), ...shown.map(([at, service]) => row(at, service)), gap((total - last) * ROW)], 'Services');
    one.classList.add('rows');
    one.setAttribute('aria-rowcount', total);
    const widths = ['34%', '20%', '17%', '9%', '12%', '8%'];
    one.querySelectorAll('th').forEach((head, index) => { head.style.width = widths[index]; });
    return [one];
  });
}

function row(at, service) {
  if (!service) return h('tr', { 'aria-rowindex': at + 2 }, h('td', { colspan: 6, class: 'quiet' }, '…'));
  const { namespace, name, endpoints, ready_endpoints: ready } = service;
  const policy = service.external_traffic_policy === service.internal_traffic_policy ?
    service.internal_traffic_policy : `${service.internal_traffic_policy}, ext. ${service.external_traffic_policy}`;
  return h('tr', { 'aria-rowindex': at + 2 },
    h('td', {}, link(`service-${at}`, `${namespace}/${name}`, () => openService(namespace, name))),
    h('td', { class: 'mono' }, service.cluster_ips[0] ?? 'headless'), h('td', {}, ports(service)),
    h('td', { class: `number ${ready === 0 ? 'text-bad' : ready < endpoints ? 'text-warn' : ''}` }, `${ready}/${endpoints}`),
    h('td', {}, policy),
    h('td', {}, service.conflicts > 0 && h('span', { class: 'text-bad' }, 'conflict'),
      service.problems > 0 && h('span', { class: 'text-warn' }, 'problem')));
}

const condition = ({ ready, serving, terminating }) =>
  terminating ? (serving ? 'terminating, serving' : 'terminating') : ready ? 'ready' : serving ? 'serving, not ready' : 'not ready';

// One Service, and what each Node does with it.
export async function follow(namespace, name, redraw, openNode) {
  const title = `${namespace}/${name}`;
  const body = openDrawer(title, () => { filter.names = undefined; redraw(); });
  try {
    const { service, endpoints, endpoint_count: all, wait } = await ask(`services/${namespace}/${name}`);
    const missing = [...wait.laggards, ...wait.absent];
    filter.names = missing.length ? new Set(missing.map(({ node }) => node)) : undefined;
    redraw();
    const complete = wait.nodes > 0 && wait.programmed === wait.nodes;
    const from = h('input', { placeholder: 'Node, NAMESPACE/POD or address', 'aria-label': 'From', value: endpoints.find(({ node }) => node)?.node ?? '' });
    const told = h('div', { 'aria-live': 'polite' });
    body.replaceChildren(...kids([
      h('p', { class: 'state' }, mark(complete ? 'well' : missing.some(({ node }) => node) && wait.laggard_count ? 'behind' : 'no_agent'),
        `${thousands(wait.programmed)} of ${count(wait.nodes, 'Node')} ${wait.nodes === 1 ? 'has' : 'have'} its present state in the kernel`),
      wait.waiting_for === 'source' && h('p', { class: 'text-bad' }, 'The replica does not follow its source now.'),
      wait.problems.map((text) => h('p', { class: 'text-bad' }, text)),
      facts([['Addresses', [...service.cluster_ips, ...service.external_ips, ...service.load_balancer_ips].join(', ') || 'headless'],
        ['Ports', ports(service)], ['Endpoints', `${service.ready_endpoints} of ${service.endpoints} ready`],
        ['Traffic', `internal ${service.internal_traffic_policy}, external ${service.external_traffic_policy}`],
        ['Affinity', service.session_affinity_timeout_seconds ? `ClientIP, ${service.session_affinity_timeout_seconds} s` : ''],
        ['Balancing', [service.load_balancing, service.scheduler].filter(Boolean).join(', ')], ['Version', thousands(service.version)]]),
      service.conflicts.map((text) => h('p', { class: 'text-bad' }, `Conflict: ${text}`)),
      service.problems.map(({ field, message }) => h('p', { class: 'text-warn' }, `${field} ${message}`)),
      missing.length > 0 && h('h3', {}, 'Nodes that lack it'),
      missing.length > 0 && table(['Node', 'Why'], missing.slice(0, 50).map(({ node, reason, lag_ms: lag }) => h('tr', {},
        h('td', {}, link(`lack-${node}`, node, () => openNode(node))), h('td', {}, reason || `behind for ${lag} ms`)))),
      h('h3', {}, 'What a Node does with a new connection'),
      h('form', { class: 'inline', onsubmit: async (event) => {
        event.preventDefault();
        told.replaceChildren(answer(await run({ command: 'explain', service: title, from: from.value })));
      } }, h('label', {}, 'From', from), h('button', { class: 'main' }, 'Explain')), told,
      h('h3', {}, `Endpoints${all > endpoints.length ? `, the first ${endpoints.length} of ${thousands(all)}` : ''}`),
      endpoints.length === 0 ? empty('None') : table(['Address', 'State', 'Node', 'Zone'], endpoints.map((one) => h('tr', {},
        h('td', { class: 'mono' }, one.address), h('td', { class: one.ready ? '' : 'text-warn' }, condition(one)),
        h('td', {}, one.node && link(`at-${one.address}`, one.node, () => openNode(one.node))), h('td', {}, one.zone))))]));
  } catch (error) {
    body.replaceChildren(h('p', { class: 'text-bad' }, error.message));
  }
}
