// The Vercel AI SDK over each protocol that it speaks, against the bundled model at a URL. It reads
// every answer by a strict schema of its own.

import assert from 'node:assert';
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { generateObject, generateText, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const MODEL = 'penstock-5m';
const at = { baseURL: process.env.TEST_API_BASE_URL, apiKey: 'none' };
const openai = createOpenAI(at);
const models = {
  responses: openai(MODEL),
  chat: openai.chat(MODEL),
  messages: createAnthropic(at)(MODEL),
};
const usual = { temperature: 0, maxOutputTokens: 60, maxRetries: 0 };
const weather = tool({
  description: 'Get the current weather of a city.',
  inputSchema: z.object({ city: z.string().max(20) }),
  execute: async () => ({ temperature: 21, sky: 'sunny' }),
});

for (const [name, model] of Object.entries(models)) {
  const called = await generateText({
    ...usual, model, prompt: 'What is the weather in Bern?', tools: { get_weather: weather },
    stopWhen: stepCountIs(4),
  });
  assert.equal(called.text, 'It is sunny in Bern, with 21 degrees.', name);
  assert.equal(called.steps.length, 2, name);

  const again = await generateText({
    ...usual, model, tools: { get_weather: weather }, stopWhen: stepCountIs(4),
    messages: [
      { role: 'user', content: 'What is the weather in Bern?' },
      ...called.response.messages,
      { role: 'user', content: 'What is the weather in Rome?' },
    ],
  });
  assert.ok(again.steps.length >= 1 && again.finishReason !== 'error', name);

  const hello = { ...usual, model, prompt: 'Hello! Who are you?' };
  const stream = streamText(hello);
  let text = '';
  for await (const piece of stream.textStream) text += piece;
  assert.equal(text, (await generateText(hello)).text, name);
  assert.equal(await stream.finishReason, 'stop', name);

  const { object } = await generateObject({
    ...usual, model, schema: z.object({ name: z.string(), age: z.number().int() }),
    prompt: 'Anna is 31 years old. Extract name and age.',
  });
  assert.deepEqual(object, { name: 'Anna', age: 31 }, name);
  console.log(`AI SDK over ${name}: passed`);
}
