"""``python llm_script.py MODEL``: what a user's own script does; says what it sees of its results."""

import sys

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(sys.argv[1], enforce_eager=True, max_model_len=256, max_num_seqs=2, dtype="bfloat16")
    plain = llm.generate(["hello", "abc"], SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)
    asked = llm.generate("hello", SamplingParams(max_tokens=4, temperature=0, logprobs=1), use_tqdm=False)
    print("PLAIN", [(result.outputs[0].logprobs, result.outputs[0].cumulative_logprob) for result in plain])
    print("ASKED", len(asked[0].outputs[0].logprobs or []))
