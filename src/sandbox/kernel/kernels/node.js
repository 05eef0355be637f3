// Runs JavaScript for the host, cell by cell, in this process's own global scope; see frame.rs. `ARGS`: mark, mode (`kernel`,
// `once`). Cells are evaluated by V8's own console mode (`replMode`): top-level await, the value of the last expression, and
// `let`, `const` and `class` that a later cell may declare anew.
'use strict';
const fs = require('fs');
const vm = require('vm');
const path = require('path');
const util = require('util');
const { pathToFileURL } = require('url');
const { createRequire } = require('module');
const { Writable } = require('stream');
const inspector = require('inspector');

const MARK = Buffer.from('\x1e' + ARGS[0] + ':');
const MODE = ARGS[1];
const PART = 4000; // with mark and head below PIPE_BUF
const MAX_TEXT = 1 << 20;
const MAX_DATA = 8 << 20;
const MAX_ERROR = 128 << 10;
const KEY = Symbol('exuvia');

// Node cannot duplicate a descriptor; opening a pipe by its name under /proc is as good.
const requests = fs.openSync('/proc/self/fd/0', 'r');
const out = fs.openSync('/proc/self/fd/1', 'w');
const err = fs.openSync('/proc/self/fd/2', 'w');
fs.closeSync(0);
fs.openSync('/dev/null', 'r'); // the lowest free number: 0

/** All of `data`, now; also where somebody made the pipe non-blocking. */
const write = (fd, data) => {
  for (let at = 0; at < data.length; ) {
    try {
      at += fs.writeSync(fd, data, at);
    } catch (error) {
      if (error.code !== 'EAGAIN') throw error;
      Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 1);
    }
  }
};
/**
 * What stands for `process.stdout` and `process.stderr`. Node's own streams keep a state between the write and its end: code that
 * is interrupted there leaves them waiting for ever. This one has none, and nothing that was written is lost at an exit.
 */
const direct = (fd) => {
  const stream = new Writable({ write: (chunk, _, done) => (write(fd, chunk), done()) });
  const put = (chunk, encoding, done) => {
    if (typeof encoding === 'function') [encoding, done] = [undefined, encoding];
    write(fd, typeof chunk === 'string' ? Buffer.from(chunk, encoding) : chunk);
    if (done) process.nextTick(done);
    return true;
  };
  const stay = () => stream;
  return Object.assign(stream, { fd, write: put, cork: stay, uncork: stay, end: stay, destroy: stay });
};
for (const [name, fd] of [['stdout', 1], ['stderr', 2]]) {
  const stream = direct(fd);
  Object.defineProperty(process, name, { configurable: true, enumerable: true, get: () => stream });
}

const send = (message, fd = out) => {
  const data = Buffer.from(JSON.stringify(message));
  for (let at = 0; ; at += PART) {
    const part = data.subarray(at, at + PART);
    const last = at + PART >= data.length;
    const head = `${(at ? 0 : 1) | (last ? 2 : 0)}${part.length.toString(16).padStart(4, '0')}`;
    write(fd, Buffer.concat([MARK, Buffer.from(head), part]));
    if (last) return;
  }
};

// --- requests

let inbox = Buffer.alloc(0);
const more = () =>
  new Promise((resolve) => {
    const chunk = Buffer.alloc(65536);
    fs.read(requests, chunk, 0, chunk.length, null, (error, length) => {
      if (error || !length) process.reallyExit(0);
      inbox = Buffer.concat([inbox, chunk.subarray(0, length)]);
      resolve();
    });
  });
const take = (length) => {
  const part = inbox.subarray(0, length);
  inbox = inbox.subarray(length);
  return part;
};
const request = async () => {
  while (!inbox.includes(10)) await more();
  const words = take(inbox.indexOf(10) + 1).toString().trim().split(' ');
  const [number, code, settings] = words.slice(1).map(Number);
  while (inbox.length < code + settings) await more();
  return { number, code: take(code).toString(), settings: JSON.parse(take(settings).toString()) };
};

// --- what a value looks like

const clip = (text, limit) => {
  const data = Buffer.from(text);
  if (data.length <= limit) return data;
  const note = `\n[... ${data.length - limit} of ${data.length} bytes left out]`;
  return Buffer.concat([data.subarray(0, limit), Buffer.from(note)]);
};
const bytes = (mime, value) => {
  if (value instanceof Uint8Array) return Buffer.from(value);
  if (mime.endsWith('json')) return Buffer.from(JSON.stringify(value));
  if (mime.startsWith('image/') && mime !== 'image/svg+xml') return Buffer.from(String(value), 'base64');
  return Buffer.from(String(value));
};
const representations = (value) => {
  let data = {};
  try {
    const bundle = value?.[Symbol.for('Jupyter.display')]?.();
    for (const [mime, item] of Object.entries(bundle ?? {})) data[mime] = bytes(mime, item);
  } catch {
    data = {};
  }
  data['text/plain'] ??= Buffer.from(util.inspect(value));
  return data;
};
const show = (data, main) => {
  let left = MAX_DATA;
  let text = data['text/plain'] ?? '';
  const packed = {};
  for (const [mime, item] of Object.entries(data)) {
    if (mime === 'text/plain') continue;
    if (item.length > left) {
      text += `\n[${mime} of ${item.length} bytes left out: too large]`;
      continue;
    }
    left -= item.length;
    packed[mime] = item.toString('base64');
  }
  packed['text/plain'] = clip(text, MAX_TEXT).toString('base64');
  send({ result: { data: packed, main } });
};

// --- errors

const told = (error) => {
  if (!util.types.isNativeError(error)) {
    let text;
    try {
      text = typeof error === 'string' ? error : util.inspect(error);
    } catch {
      text = '<its text cannot be made>';
    }
    return { name: 'Thrown', value: clip(text, MAX_ERROR).toString(), traceback: '' };
  }
  let [name, value, stack] = ['Error', '', ''];
  try {
    [name, value, stack] = [String(error.name), String(error.message), String(error.stack ?? '')];
  } catch {
    // Getters of the code's own may throw.
  }
  // From the driver's first frame down nothing is the user's.
  let lines = stack.split('\n');
  const ours = lines.findIndex((line) => /^\s+at .*(<kernel>|node:inspector)/.test(line));
  if (ours >= 0) lines = lines.slice(0, ours);
  lines = lines.filter((line) => !/^\s+at (new Promise \(<anonymous>\)|.*node:internal\/)/.test(line));
  const cut = (text) => clip(text, MAX_ERROR).toString();
  return { name: cut(name), value: cut(value), traceback: cut(lines.join('\n')) };
};

class Interrupted extends Error {}
Interrupted.prototype.name = 'Interrupted';
class ExitStatus extends Error {}
ExitStatus.prototype.name = 'ExitStatus';

// --- running code

const session = new inspector.Session();
session.connect();
/** Asks V8; the promise is resolved with what it answers, whenever that is. */
const ask = (method, parameters) =>
  new Promise((resolve) => session.post(method, parameters, (error, answer) => resolve({ error, answer })));
/** Runs `body` so that SIGINT ends synchronous code in it. */
const breakable = new vm.Script('(f => f())(globalThis.__exuvia)', { filename: '<kernel>' });
const guarded = (body) => {
  Object.defineProperty(globalThis, '__exuvia', {
    configurable: true,
    get() {
      delete globalThis.__exuvia;
      return body;
    },
  });
  try {
    breakable.runInThisContext({ breakOnSigint: true });
  } finally {
    delete globalThis.__exuvia;
  }
};
/** The value that V8 speaks of. */
const valueOf = async (remote) => {
  if (remote.objectId === undefined && remote.unserializableValue === undefined) return remote.value;
  let value;
  Object.defineProperty(globalThis, KEY, { configurable: true, enumerable: false, value: (given) => (value = given) });
  const argument =
    remote.objectId === undefined ? { unserializableValue: remote.unserializableValue } : { objectId: remote.objectId };
  await ask('Runtime.callFunctionOn', {
    functionDeclaration: `function (given) { for (const key of Object.getOwnPropertySymbols(globalThis)) if (key.description === 'exuvia') globalThis[key](given) }`,
    objectId: here,
    arguments: [argument],
    silent: true,
  });
  delete globalThis[KEY];
  return value;
};

let here;
let running = null;
/** Something went wrong outside of any await: it is the error of the cell that runs. */
const stray = (error) => {
  if (running) running.fail(error);
  else process.stderr.write(`${told(error).traceback || util.inspect(error)}\n`);
};

/**
 * V8's console mode has no `import()`; calls of it go to this module's own. Strings, templates, comments and words that
 * only contain it are left alone.
 */
const TOKENS = /\/\*[^]*?\*\/|\/\/.*|'(?:\\[^]|[^'\\\n])*'|"(?:\\[^]|[^"\\\n])*"|`(?:\\[^]|[^`\\])*`|(?<![\w$.#])import(?=\s*\()/g;
const importable = (text) => text.replace(TOKENS, (token) => (token === 'import' ? '__import' : token));

const evaluate = async (text, name) => {
  let answered;
  const ended = new Promise((resolve, reject) => {
    running = { fail: reject };
    answered = resolve;
  });
  ended.catch(() => {});
  try {
    guarded(() => {
      ask('Runtime.evaluate', {
        expression: `${importable(text)}\n//# sourceURL=${name}`,
        replMode: true,
        awaitPromise: true,
        includeCommandLineAPI: false,
        objectGroup: 'cell',
        userGesture: false,
      }).then(answered);
    });
  } catch (error) {
    if (error?.code !== 'ERR_SCRIPT_EXECUTION_INTERRUPTED') throw error;
    throw new Interrupted('interrupted');
  }
  const { error, answer } = await ended;
  if (error) throw /terminated/.test(error.message) ? new Interrupted('interrupted') : new Error(error.message);
  // Rejections that nobody has taken up are told at the end of the turn.
  await Promise.race([ended.then(() => new Promise((resolve) => setImmediate(resolve))), new Promise((_, reject) => (running.fail = reject))]);
  if (answer.exceptionDetails) {
    const { exception, text: said } = answer.exceptionDetails;
    throw exception ? await valueOf(exception) : new Error(said);
  }
  return valueOf(answer.result);
};

const cell = async ({ number, code, settings }) => {
  const before = {};
  for (const [name, value] of Object.entries(settings.env ?? {})) {
    before[name] = process.env[name];
    process.env[name] = value;
  }
  let failure = null;
  try {
    const value = await evaluate(code, `<cell:${number}>`);
    if (value !== undefined) show(representations(value), true);
  } catch (error) {
    failure = { error };
  }
  running = null;
  // Signals that were meant for this cell and are still under way: the second turn has looked for them.
  if (failure?.error instanceof Interrupted) for (const _ of [1, 2]) await new Promise((resolve) => setImmediate(resolve));
  await ask('Runtime.releaseObjectGroup', { objectGroup: 'cell' });
  for (const [name, value] of Object.entries(before)) {
    if (value === undefined) delete process.env[name];
    else process.env[name] = value;
  }
  if (failure) send({ error: told(failure.error) });
  return failure;
};

const end = (number, ok, interrupted, status) => {
  send({ sync: number }, err);
  send({ end: { number, ok, interrupted, ...(status === undefined ? {} : { status }) } });
};

const main = async () => {
  const module_ = new (require('module'))('<cell>');
  const own = {
    require: createRequire(`${process.cwd()}/`),
    module: module_,
    exports: module_.exports,
    __import: (name, options) => import(/^\.{0,2}\//.test(name) ? pathToFileURL(path.resolve(name)) : name, options),
    display: (...values) => values.forEach((value) => show(representations(value), false)),
  };
  for (const [name, value] of Object.entries(own))
    Object.defineProperty(globalThis, name, { value, writable: true, configurable: true, enumerable: false });
  here = (await ask('Runtime.evaluate', { expression: 'globalThis' })).answer.result.objectId;
  process.argv.length = 1;
  process.on('unhandledRejection', stray);
  process.on('uncaughtException', stray);
  // SIGURG for a cell that waits; SIGINT for one that does not, so that it comes here only when the cell has just begun to wait.
  for (const signal of ['SIGURG', 'SIGINT']) process.on(signal, () => running?.fail(new Interrupted('interrupted')));
  send({ ready: { version: process.versions.node } });
  if (MODE === 'once') {
    const asked = await request();
    let [status, failure] = [0, null];
    process.on('exit', (code) => {
      status = status || code || 0;
      end(asked.number, status === 0, failure?.error instanceof Interrupted, status);
      process.reallyExit(status);
    });
    failure = await cell(asked);
    running = { fail: (error) => ((status = 1), send({ error: told(error) }), process.exit(1)) };
    if (failure) process.exit(1);
    return;
  }
  setInterval(() => {}, 1 << 30); // a cell may wait for nothing at all
  const leave = process.exit;
  process.exit = (code) => {
    if (!running) leave.call(process, code);
    throw new ExitStatus(String(code ?? process.exitCode ?? 0));
  };
  for (;;) {
    const asked = await request();
    const failure = await cell(asked);
    end(asked.number, !failure, failure?.error instanceof Interrupted);
  }
};
main();
//# sourceURL=<kernel>
