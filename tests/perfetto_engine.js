// Opens traces in Perfetto's trace processor: the UI's own WebAssembly worker, hosted by node, offline.
// stdin: {"dist": folder of engine_bundle.js, "paths": [...], "sql": [...]}; stdout: one JSON line per path.
'use strict';
const fs = require('fs'), path = require('path');

// ---- protobuf, as much as TraceProcessorRpc needs (protos/perfetto/trace_processor/trace_processor.proto) ----
function varint(value) {
  const bytes = [];
  for (let n = value; ; n = Math.floor(n / 128)) {
    if (n < 128) return Buffer.from([...bytes, n]);
    bytes.push((n % 128) | 128);
  }
}
const number = (field, n) => Buffer.concat([varint(field * 8), varint(n)]);
const bytes = (field, b) => Buffer.concat([varint(field * 8 + 2), varint(b.length), b]);
class Reader {
  constructor(buf) { this.buf = buf; this.at = 0; }
  varint() {
    let n = 0n;
    for (let shift = 0n; ; shift += 7n) {
      const b = this.buf[this.at++];
      n |= BigInt(b & 127) << shift;
      if (!(b & 128)) return n;
    }
  }
  take(n) { this.at += n; return this.buf.subarray(this.at - n, this.at); }
  *fields() {
    while (this.at < this.buf.length) {
      const key = Number(this.varint()), wire = key & 7;
      yield [key >>> 3, wire === 0 ? this.varint() : this.take(wire === 1 ? 8 : wire === 5 ? 4 : Number(this.varint()))];
    }
  }
}
const fields = buf => [...new Reader(buf).fields()];
const pick = (buf, field) => fields(buf).filter(([f]) => f === field).map(([, value]) => value);
const text = (buf, field) => pick(buf, field).map(String).join('');

// ---- the engine ----
const [APPEND, FINALIZE, QUERY, RESET] = [1, 2, 3, 11];
class Engine {
  constructor(dist) {
    const load = name => fs.readFileSync(path.join(dist, path.basename(name)));
    class Request { // how the worker fetches its wasm
      open(_method, url) { this.url = url; }
      send() { this.status = 200; this.response = new Uint8Array(load(this.url)).buffer; }
    }
    const self = {location: {href: 'http://localhost/engine_bundle.js'}};
    const log = line => process.stderr.write(`${line}\n`);
    const wasm = Object.create(WebAssembly);
    wasm.instantiate = (...args) => this.ready = WebAssembly.instantiate(...args);
    const globals = {
      self, location: self.location, WebAssembly: wasm, XMLHttpRequest: Request, WorkerGlobalScope: class {},
      console: {log, info: log, warn: log, error: log},
      // else it takes node for its host, or fetches from the network
      process: undefined, require: undefined, module: undefined, exports: undefined, fetch: undefined,
    };
    new Function(...Object.keys(globals), String(load('engine_bundle.js')))(...Object.values(globals));
    this.port = {postMessage: data => this.received.push(Buffer.from(data))};
    this.received = [];
    this.sequence = 0;
    self.onmessage({data: this.port});
  }
  async start() { // what is sent before the wasm runs kills it
    await this.ready;
    await new Promise(resolve => setImmediate(resolve)); // its own callbacks come first
  }
  call(method, ...args) { // the answers come before onmessage returns
    this.received = [];
    const rpc = Buffer.concat([number(1, this.sequence), number(2, method), ...args]);
    this.port.onmessage({data: new Uint8Array(bytes(1, rpc))});
    this.sequence++;
    const answers = pick(Buffer.concat(this.received), 1);
    const fatal = answers.map(answer => text(answer, 5)).join('');
    if (fatal) throw new Error(fatal);
    return answers;
  }
  load(file) { // -> the error that the UI would show, or ''
    this.call(RESET);
    const buf = Buffer.alloc(4 << 20), fd = fs.openSync(file, 'r');
    let error = '';
    if (!fs.fstatSync(fd).size) error = 'the file is empty'; // which it takes for a good trace of nothing
    for (let n; !error && (n = fs.readSync(fd, buf)); )
      for (const answer of this.call(APPEND, bytes(101, buf.subarray(0, n))))
        for (const result of pick(answer, 201)) error += text(result, 2);
    fs.closeSync(fd);
    if (!error)
      for (const answer of this.call(FINALIZE)) for (const result of pick(answer, 212)) error += text(result, 1);
    return error;
  }
  query(sql) { // -> rows of cells
    const names = [], cells = [];
    for (const answer of this.call(QUERY, bytes(103, bytes(1, Buffer.from(sql)))))
      for (const result of pick(answer, 203)) {
        if (text(result, 2)) throw new Error(`${sql}: ${text(result, 2)}`);
        names.push(...pick(result, 1));
        for (const batch of pick(result, 3)) {
          const join = field => new Reader(Buffer.concat(pick(batch, field)));
          const [types, ints, doubles] = [join(1), join(2), join(3)], strings = text(batch, 5).split('\0');
          while (types.at < types.buf.length) {
            const type = Number(types.varint()); // 1 null, 2 integer, 3 double, 4 string, 5 blob
            cells.push(type === 2 ? BigInt.asIntN(64, ints.varint()) : type === 3 ? doubles.take(8).readDoubleLE()
              : type === 4 ? strings.shift() : null);
          }
        }
      }
    const rows = [];
    for (let at = 0; at < cells.length; at += names.length) rows.push(cells.slice(at, at + names.length));
    return rows;
  }
}

const json = x => Array.isArray(x) ? `[${x.map(json)}]` : typeof x === 'bigint' ? String(x) : JSON.stringify(x);
const BAD_STATS = "select name, idx, severity, value, description from stats " +
  "where value != 0 and severity in ('error', 'data_loss')";
(async () => {
  const {dist, paths, sql} = JSON.parse(fs.readFileSync(0, 'utf8'));
  const engine = new Engine(dist);
  await engine.start();
  for (const file of paths) {
    const error = engine.load(file);
    const bad = error ? [] : engine.query(BAD_STATS), rows = error ? [] : sql.map(query => engine.query(query));
    await new Promise(done => process.stdout.write(`${json([error, bad, rows])}\n`, done));
  }
  process.exit(0);
})();
