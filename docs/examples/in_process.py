"""Run a model in this process, without Redis. It needs `pip install '.[worker]'`.

python docs/examples/in_process.py [FOLDER or name of a model]
"""

import sys

from penstock import LLM, SamplingParams

llm = LLM(model=sys.argv[1] if len(sys.argv) > 1 else "penstock-5m")
params = SamplingParams(temperature=0, max_tokens=60)

for output in llm.generate(["Once upon a time", "How to bake a cake:"], params, use_tqdm=False):
    print(f"{output.prompt} ->{output.outputs[0].text}")

question = [{"role": "user", "content": "What is the capital of Norway?"}]
[answer] = llm.chat(question, params, use_tqdm=False)
print(answer.outputs[0].text)
