// Questions to the control plane: the same commands as in a terminal, and their answers.
import { ask } from './model.js';
import { $, h, say } from './words.js';

const FIELDS = {
  explain: [['service', 'Service', 'shop/web', true], ['from', 'From Node, pod or address', ''],
    ['source', 'Address of a client outside', ''], ['to', 'To address:port', '']],
  verify: [['node', 'Node; empty means all', ''], ['allow_absent', 'Accept Nodes without an agent']],
  wait: [['service', 'Service', 'shop/web', true], ['endpoint', 'Endpoint address', ''], ['timeout', 'At most', '10s'],
    ['gone', 'Until it is gone'], ['allow_absent', 'Accept Nodes without an agent']],
  drain: [['pod', 'Pod', 'shop/web-7d4b', true], ['timeout', 'At most', '25s']],
};
let command = 'explain';

export async function run(question) {
  try {
    return await ask(`ask/${question.command}`, question);
  } catch (error) {
    return { text: error.message, code: 1 };
  }
}

export const answer = ({ text, code }) => h('pre', { tabindex: 0, class: code ? 'bad' : '' }, text.trimEnd());

const question = () => Object.fromEntries([['command', command], ...[...$('ask-fields').querySelectorAll('input')]
  .map((input) => [input.name, input.type === 'checkbox' ? input.checked : input.value.trim()])
  .filter(([, value]) => value)]);

// The command that does the same in a terminal.
function shown({ command: name, service, node, pod, ...options }) {
  const quoted = (text) => (/^[\w./:@[\]-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);
  const flags = Object.entries(options).map(([key, value]) =>
    `--${key.replace('_', '-')}${value === true ? '' : ` ${quoted(value)}`}`);
  return ['headgatectl', name, service ?? node ?? pod, ...flags].filter(Boolean).join(' ');
}

function choose(name, values = {}) {
  command = name;
  $('ask-fields').replaceChildren(...FIELDS[name].map(([key, label, example, required]) => {
    const isCheck = example === undefined;
    const input = h('input', { name: key, type: isCheck ? 'checkbox' : 'text', placeholder: example || undefined, required,
      autocomplete: 'off', spellcheck: 'false', value: isCheck ? undefined : values[key] });
    return isCheck ? h('label', { class: 'check' }, input, label) : h('label', {}, label, input);
  }));
  say('ask-command', shown(question()));
}

export function fillIn(name, values) {
  document.querySelector(`#ask-form input[value=${name}]`).checked = true;
  choose(name, values);
  $('ask').scrollIntoView();
  $('ask-fields').querySelector('input').focus({ preventScroll: true });
}

export function start() {
  document.querySelector('#ask-form fieldset').append(...Object.keys(FIELDS).map((name) =>
    h('label', {}, h('input', { type: 'radio', name: 'command', value: name, checked: name === command, onchange: () => choose(name) }),
      h('span', {}, name[0].toUpperCase() + name.slice(1)))));
  choose(command);
  $('ask-fields').addEventListener('input', () => say('ask-command', shown(question())));
  $('ask-form').addEventListener('submit', async (event) => {
    event.preventDefault();
    const button = event.submitter ?? $('ask-form').querySelector('.main');
    const output = $('ask-answer');
    button.disabled = true;
    output.hidden = false;
    output.textContent = 'Asking…';
    const { text, code } = await run(question());
    output.classList.toggle('bad', code !== 0);
    output.textContent = text.trimEnd();
    button.disabled = false;
  });
}
