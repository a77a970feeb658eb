// Prints the events of a job as lines of JSON: `node follow.mjs URL JOB [HAD CHECKSUM]`. With HAD it
// reads on after so many tokens of a job that is there already.

import { Queue } from "./penstock.mjs";

const [url, text, had, checksum] = process.argv.slice(2);
const job = JSON.parse(text);
const queue = await new Queue(url, job.model).open();
if (had === undefined) {
  const [outcome] = await queue.enqueue(job);
  if (outcome !== "accepted") throw new Error(outcome);
}
for await (const event of queue.follow(job.job_id, Number(had ?? 0), checksum ? Number(checksum) : null)) {
  console.log(JSON.stringify(event));
}
queue.close();
