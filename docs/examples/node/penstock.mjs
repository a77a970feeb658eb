// Enqueue a job, follow its tokens, cancel one, with nothing but npm's redis; docs/protocol.md has the rules.
//
//   npm install
//   for name in enqueue attach cancel; do
//     python -m penstock.schemas.redis.script jobs/$name > $name.lua
//   done
//   node penstock.mjs [redis://127.0.0.1:6379/0 [MODEL]]

import { createHash, randomBytes } from "node:crypto";
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";
import { crc32 } from "node:zlib";
import { blake2b } from "@noble/hashes/blake2.js"; // Node's own has no digest of 5 bytes
import { createClient, ErrorReply } from "redis";

const PAGE = 512; // most events that one look at a log gives
const SILENCE_MS = 5000; // after which a reader looks at the log, and a connection counts as lost
const RETRY_MS = 100;
const TENANT = "default";

export class Queue {
  constructor(url, model) {
    this.model = model;
    this.prefix = `penstock:{${model}:0}:`;
    // A connection that fell silent is made anew: its other end may be gone, and nobody tells.
    const socket = { socketTimeout: SILENCE_MS, reconnectStrategy: () => RETRY_MS };
    this.redis = createClient({ url, name: "penstock-node", pingInterval: SILENCE_MS / 4, socket });
    this.listener = this.redis.duplicate();
    for (const each of [this.redis, this.listener]) each.on("error", () => {}); // it connects again
  }

  async open() {
    await Promise.all([this.redis.connect(), this.listener.connect()]);
    return this;
  }

  close() {
    this.redis.destroy();
    this.listener.destroy();
  }

  newId() {
    const label = base32(blake2b(Buffer.from(this.model), { dkLen: 5 }), 6);
    return `job_${label}0_${base32(randomBytes(17), 26)}`;
  }

  // Returns the outcome, jobs that waited, milliseconds after which to try again, why, and when the
  // job that is here was submitted.
  async enqueue(job, options = {}) {
    const body = JSON.stringify({ ...job, model: this.model });
    const digest = createHash("sha256").update(body).digest("hex");
    const channel = this.channel(job.job_id);
    return this.run("enqueue", job.job_id, digest, body, channel, JSON.stringify(options));
  }

  // Yields the events after the first `had` tokens, once and in order, to the end. `had` is where an
  // event ended; `checksum` is that event's, or null where it is not known.
  async *follow(jobId, had = 0, checksum = null) {
    const channel = this.channel(jobId);
    const cursor = new Cursor(jobId, had, had === 0 ? 0 : checksum);
    const heard = new Mailbox();
    const hear = (text) => heard.put(text.split("\n").map((line) => JSON.parse(line).event));
    const lookAgain = () => heard.put([]); // a new connection did not hear what came meanwhile
    this.listener.on("ready", lookAgain);
    try {
      await this.again(() => this.listener.subscribe(channel, hear));
      for (;;) {
        const page = await this.look(jobId, channel, cursor.had);
        let events = page;
        do {
          for (const event of events) {
            if (!cursor.take(event)) continue;
            yield event;
            if (event.type !== "delta") return;
          }
          if (page.length >= PAGE) break;
          events = await heard.take(SILENCE_MS);
        } while (events.length > 0 && !cursor.hasMissed(events));
      }
    } finally {
      this.listener.off("ready", lookAgain);
      this.listener.unsubscribe(channel, hear).catch(() => {});
    }
  }

  // The log from the cursor on; what comes after it goes to the channel.
  async look(jobId, channel, had) {
    const [state, kind, ...events] = await this.run("attach", TENANT, jobId, channel, had, PAGE);
    if (kind === "result") throw new Error(`${jobId} ${state}, and its log is gone: read its result`);
    if (kind !== "log") throw new Error(`${jobId} is ${state}`);
    return events.map((event) => JSON.parse(event));
  }

  // Returns the state that the job was in; its readers hear of the end.
  async cancel(jobId) {
    return (await this.run("cancel", TENANT, jobId, 0))[0];
  }

  // The whole answer, or null where the job runs or its result is gone.
  async result(jobId) {
    return JSON.parse(await this.again(() => this.redis.get(`${this.prefix}job:${jobId}:result`)));
  }

  channel(jobId) {
    return `${this.prefix}job:${jobId}:events`;
  }

  async run(script, ...args) {
    const text = readFileSync(new URL(`${script}.lua`, import.meta.url), "utf8");
    const call = { keys: [this.prefix], arguments: args.map(String) };
    return this.again(() => this.redis.eval(text, call));
  }

  // Where the connection was cut before the reply: every script may be sent again.
  async again(call) {
    for (;;) {
      try {
        return await call();
      } catch (error) {
        if (error instanceof ErrorReply || !this.redis.isOpen) throw error;
      }
    }
  }
}

// How many tokens of a job a reader has, and their checksum.
class Cursor {
  constructor(jobId, had, checksum) {
    Object.assign(this, { jobId, had, checksum });
  }

  // Whether some event begins after what the reader has: the log has what it missed.
  hasMissed(events) {
    return events[0].position > this.had;
  }

  // Counts an event as read; returns false where the reader has it.
  take(event) {
    const tokens = event.token_ids ?? [];
    if (event.type === "delta" && event.position + tokens.length <= this.had) return false;
    const choice = (event.index ?? 0) << 22;
    let sum = this.checksum;
    if (sum !== null) for (const token of tokens) sum = crc32(word(token ^ choice), sum);
    const isSame = sum === null || (event.checksum ?? sum) === sum;
    if (event.position !== this.had || !isSame) {
      throw new Error(`${this.jobId}: its log does not continue the first ${this.had} tokens`);
    }
    this.had += tokens.length;
    this.checksum = sum ?? event.checksum ?? null;
    return true;
  }
}

// Lists of events, given to one reader in the order in which they were heard.
class Mailbox {
  #lists = [];
  #wake = () => {};

  put(events) {
    this.#lists.push(events);
    this.#wake();
  }

  // The next list; an empty one after so many milliseconds without any.
  async take(milliseconds) {
    if (this.#lists.length === 0) {
      await new Promise((resolve) => {
        const timer = setTimeout(resolve, milliseconds);
        this.#wake = () => resolve(clearTimeout(timer));
      });
    }
    return this.#lists.shift() ?? [];
  }
}

function word(value) {
  const bytes = Buffer.alloc(4);
  bytes.writeUInt32LE(value >>> 0);
  return bytes;
}

function base32(bytes, length) {
  const bits = Array.from(bytes, (byte) => byte.toString(2).padStart(8, "0")).join("");
  const letters = bits.match(/.{5}/g).map((five) => "abcdefghijklmnopqrstuvwxyz234567"[parseInt(five, 2)]);
  return letters.join("").slice(0, length);
}

async function main([url = "redis://127.0.0.1:6379/0", model = "penstock-5m"]) {
  const queue = await new Queue(url, model).open();
  const params = { max_tokens: 64 };
  const first = queue.newId();
  const [outcome, , , reason] = await queue.enqueue({ job_id: first, prompts: ["Hello"], params });
  console.log(`${first}: ${outcome} ${reason}`.trimEnd());
  if (outcome === "accepted") {
    for await (const event of queue.follow(first)) {
      const isText = event.type === "delta"; // one without text has no such field
      process.stdout.write(isText ? (event.text ?? "") : `\nended: ${event.type}\n`);
    }
    const { usage } = await queue.result(first);
    console.log(`tokens: ${usage.completion_tokens}`);

    const second = queue.newId();
    await queue.enqueue({ job_id: second, prompts: ["Hello"], params: { max_tokens: 2000, ignore_eos: true } });
    for await (const event of queue.follow(second)) {
      if (event.position === 0 && event.type === "delta") await queue.cancel(second);
      if (event.type === "failed") console.log(`${second}: ${event.state}`);
    }
  }
  queue.close();
}

if (import.meta.url === pathToFileURL(process.argv[1]).href) await main(process.argv.slice(2));
