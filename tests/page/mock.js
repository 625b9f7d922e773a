// A stand-in for `headgatectl dashboard` with a cluster of any size, for tests of the page alone.
import { createServer } from 'node:http';
import { readFileSync } from 'node:fs';
import { extname } from 'node:path';

const FOLDER = new URL('../../cli/src/dashboard/', import.meta.url);
const TYPES = { '.html': 'text/html; charset=utf-8', '.css': 'text/css', '.js': 'text/javascript' };
export const POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; " +
  "img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'";
const NAMESPACES = ['shop', 'search', 'billing', 'media', 'platform', 'identity', 'kube-system'];
const NAMES = ['cart', 'web', 'checkout', 'catalog', 'ledger', 'ranker', 'thumbs', 'gateway', 'login', 'mail'];
const random = (() => { let seed = 7; return (max) => { seed = (seed * 1103515245 + 12345) % 2147483648; return (seed >> 9) % max; }; })();
const name = (index) => `${NAMES[index % NAMES.length]}${index < NAMES.length ? '' : `-${Math.floor(index / NAMES.length)}`}`;

function rows(size, now) {
  const zones = size > 3 ? ['eu-1a', 'eu-1b', 'eu-1c'] : ['eu-1a'];
  const pools = size > 3 ? ['general', 'memory', 'gpu'] : ['general'];
  const all = [];
  for (let index = 0; index < size; index += 1) {
    const zone = zones[index % zones.length], share = Math.floor(index / zones.length) % 20;
    const pool = pools[share < 13 || pools.length === 1 ? 0 : share < 18 ? 1 : 2];
    all.push([size > 3 ? `node-${String(index + 1).padStart(4, '0')}` : `node-${'abc'[index]}`, zone, pool,
      pool === 'gpu' ? 'iptables-nft' : 'nftables', index % 9 ? '0.1.0' : '0.0.9', `cp-${1 + (index % 3)}`, now - random(500_000), 'well']);
  }
  return all;
}

function unwell(all, now) {
  const set = (index, state, more) => { all[index][7] = state; all[index][8] = more; };
  const ask = 'it lost its stream: start the agent, or look at the network of the Node';
  set(411, 'no_agent', { reason: ask, departed: now - 14 * 60_000 });
  set(412, 'no_agent', { reason: ask, departed: now - 14 * 60_000 });
  set(2977, 'no_agent', { reason: 'it never had an agent: does the DaemonSet tolerate its taints?' });
  set(1200, 'behind', { lag: 5000 });
  set(4031, 'behind', { lag: 30_000 });
  set(3333, 'failing', { error: 'nft: table inet headgate: Operation not supported (is the module nf_tables loaded?)' });
  set(2048, 'drift', { drift: 1 });
}

function service(index, size) {
  const namespace = NAMESPACES[index % NAMESPACES.length], endpoints = 2 + (index % 9);
  const ready = index % 97 === 5 ? 0 : index % 53 === 7 ? endpoints - 1 : endpoints;
  return {
    namespace, name: name(Math.floor(index / NAMESPACES.length)), endpoints, ready_endpoints: ready, version: 48_211 - (index % 900),
    cluster_ips: [`10.96.${(index >> 8) % 256}.${index % 256}`], external_ips: [], load_balancer_ips: [],
    ports: [{ name: 'http', port: 80, node_port: index % 40 ? 0 : 30_080, protocol: 'TCP' }], internal_traffic_policy: 'Cluster',
    external_traffic_policy: index % 31 ? 'Cluster' : 'Local', session_affinity_timeout_seconds: 0, scheduler: '', load_balancing: '',
    conflicts: index === size - 3 ? ['external IP 192.0.2.20 belongs to Service shop/web'] : [], problems: [],
  };
}

function status(size, services, now) {
  const replica = (number) => ({
    replica: `cp-${number}`, epoch: '9f3a', state: 'joined', for_ms: 5_400_000, agents: Math.floor(size / 3) + number, problem: '', build: '0.1.0',
    source_state: 'following', source_age_ms: 300 + number * 70, certificate_not_after_unix_ms: now + 61 * 86_400_000, balance_limit: 0, positions: [],
  });
  return {
    ...replica(1), version: 48_211, source: 'kubernetes', synced: true, services, endpoints: services * 6, nodes: size, source_problem: '',
    problems: size > 3 ? [{ object: 'Service shop/broken', field: 'spec.clusterIPs[0]', message: 'is no IP address: correct it, or remove the Service', origin: '' },
      { object: 'EndpointSlice media/thumbs-x7k2p', field: 'endpoints[3].addresses[0]', message: 'fe80::1 is a link-local address, which is not forwarded', origin: '' }] : [],
    fleet: { nodes: size, measured_commits: 0, agent_versions: [{ version: '0.0.9', agents: Math.ceil(size / 9) }, { version: '0.1.0', agents: size - Math.ceil(size / 9) }] },
    source_ages: [{ kind: 'services', age_ms: 900 }, { kind: 'endpoint_slices', age_ms: 370 }, { kind: 'nodes', age_ms: 2100 }],
    replicas: size > 3 ? [replica(2), replica(3)] : [], conflicts: size > 3 ? 1 : 0, services_without_ready_endpoints: size > 3 ? 103 : 0,
  };
}

// Starts the server; `size` is the number of Nodes, `rate` the number of changes listed each second.
export async function start({ size, services = 10_000, rate = 8, isWell = false, token = 'mock' }) {
  const now = Date.now(), all = rows(size, now);
  if (!isWell && size >= 5000) unwell(all, now);
  let version = 48_000;
  const bytes = { stream: 0, other: 0 };
  const change = (at) => {
    version += 1;
    const index = random(700), other = service(index, services), took = Math.round(60 + random(90) + (random(60) ? 0 : 900 + random(6000)));
    return [version, at, `${other.namespace}/${other.name}`, `10.244.${random(250)}.${random(250)}`, 1 + (random(9) ? 0 : random(12)),
      'trigger annotation', took, size, 0, 'done', all[random(8) ? random(size) : 1200 % size][0], ''];
  };
  const streams = new Set(), timers = new Set();
  const server = createServer((request, response) => {
    const url = new URL(request.url, 'http://mock'), parts = url.pathname.split('/').filter(Boolean);
    const json = (value) => {
      const text = JSON.stringify(value);
      bytes.other += text.length;
      response.writeHead(200, { 'Content-Type': 'application/json' }).end(text);
    };
    if (parts[0] !== 'api') {
      const file = url.pathname === '/' ? 'index.html' : parts.at(-1);
      try {
        const text = readFileSync(new URL(file, FOLDER));
        response.writeHead(200, { 'Content-Type': TYPES[extname(file)], 'Content-Security-Policy': POLICY }).end(text);
      } catch { response.writeHead(404).end(); }
      return;
    }
    if (request.headers.authorization !== `Bearer ${token}`) { response.writeHead(401).end('the token is missing'); return; }
    if (parts[1] === 'stream') {
      response.writeHead(200, { 'Content-Type': 'application/x-ndjson' });
      const send = (message) => { const line = `${JSON.stringify(message)}\n`; bytes.stream += line.length; response.write(line); };
      streams.add(response);
      send({ t: 'link', up: true, server: 'https://headgate.example:7444', problem: '', at: now });
      send({ t: 'status', now: Date.now(), s: status(size, services, now) });
      send({ t: 'nodes', all: true, complete: true, set: all });
      send({ t: 'times', list: Array.from({ length: 256 }, (_, index) => change(Date.now() - (256 - index) * 1100)) });
      const timer = setInterval(() => {
        send({ t: 'times', list: Array.from({ length: rate }, () => change(Date.now())), left_out: rate ? 12 : 0 });
      }, 1000);
      const slow = setInterval(() => send({ t: 'status', now: Date.now(), s: { version, source_age_ms: random(900) } }), 15_000);
      timers.add(timer).add(slow);
      request.on('close', () => { clearInterval(timer); clearInterval(slow); streams.delete(response); });
    } else if (parts[1] === 'services' && parts.length === 2) {
      const search = url.searchParams.get('search') ?? '', offset = Number(url.searchParams.get('offset'));
      const only = url.searchParams.get('only'), found = [];
      for (let index = 0; index < services; index += 1) {
        const one = service(index, services);
        const isWanted = { unready: one.ready_endpoints === 0, conflict: one.conflicts.length, problem: one.problems.length }[only] ?? true;
        if (isWanted && (`${one.namespace}/${one.name}`.includes(search) || one.cluster_ips[0].includes(search))) found.push(one);
      }
      const rows = found.slice(offset, offset + Number(url.searchParams.get('limit'))).map((one) =>
        ({ ...one, conflicts: one.conflicts.length, problems: one.problems.length }));
      json({ all: services, total: found.length, services: rows });
    } else if (parts[1] === 'services') {
      const [, , namespace, name] = parts;
      const endpoints = Array.from({ length: 6 }, (_, index) => ({ address: `10.244.${index}.${17 + index}`, ready: index !== 3, serving: index !== 3, terminating: false,
        node: all[index * 7 % size][0], zone: all[index * 7 % size][1], ports: ['http 8080/TCP'] }));
      const lack = all.filter((row) => row[7] === 'behind'), absent = all.filter((row) => row[7] === 'no_agent');
      json({ service: { ...service(1, services), namespace, name, endpoints: 6, ready_endpoints: 5 }, endpoints, endpoint_count: 6,
        wait: { nodes: size, programmed: size - lack.length - absent.length, laggard_count: lack.length, problems: [],
          laggards: lack.map(([node]) => ({ node, reason: 'the version was sent, and there is no ACK yet', lag_ms: 5100 })),
          absent: absent.map(([node, , , , , , , , more]) => ({ node, reason: more.reason })) } });
    } else if (parts[1] === 'nodes') {
      const row = all.find(([node]) => node === parts[2]), more = row?.[8] ?? {};
      json({ agent: { node: row[0], zone: row[1], pool: row[2], backend: row[3], agent_version: row[4], replica: row[5], state: row[7] === 'no_agent' ? 'no_agent' : 'up_to_date',
        head_version: 48_211, programmed_version: row[7] === 'behind' ? 48_180 : 48_211, lag_ms: more.lag ?? 0, apply_microseconds: 910, services_planned: 1, objects_written: 3,
        verified_unix_ms: row[6], drift_count: more.drift ?? 0, connected_unix_ms: now - 7_000_000, address: '10.0.3.17:41822', resume: 'log', rejections: [], degraded: [], departed_ms: 0,
        drift: more.drift ? [{ service: 'shop/web', difference: 'the kernel lacks endpoint 10.244.3.20:8080 behind 10.96.0.1:80/TCP' }] : [] } });
    } else {
      request.resume();
      json({ code: 0, text: 'From node node-0001 to Service shop/web\n\n10.96.0.1:80/TCP: forwarded\n  1. The address belongs to the Service.\n\nENDPOINT          STATE  NODE       ZONE   CHOSEN\n10.244.0.17:8080  ready  node-0001  eu-1a  yes\n' });
    }
  });
  await new Promise((done) => server.listen(0, '127.0.0.1', done));
  return {
    url: `http://127.0.0.1:${server.address().port}/?token=${token}`, bytes,
    stop() { timers.forEach(clearInterval); streams.forEach((stream) => stream.destroy()); server.close(); server.closeAllConnections(); },
  };
}
