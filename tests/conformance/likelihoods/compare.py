"""Likelihoods of lm-evaluation-harness, through our server and by its transformers backend; runs in its environment.

Prints one JSON line: how many were compared, the largest difference, and how many greedy flags differ.
"""

import json
import os
from pathlib import Path

import lm_eval
import yaml
from lm_eval.tasks import TaskManager

HERE = Path(__file__).parent / "tasks"
MODEL = os.environ["CONFORMANCE_DEMO_MODEL"]
URL = os.environ["CONFORMANCE_URL"]


def tasks():
    found = []
    for path in sorted(HERE.glob("*.yaml")):
        task = yaml.safe_load(path.read_text())
        task["dataset_kwargs"]["data_files"]["test"] = str(HERE / task["dataset_kwargs"]["data_files"]["test"])
        found.append(task)
    return found


def likelihoods(model, arguments):
    """By task and document: log likelihood and, for continuations, whether it is the greedy one."""
    results = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=tasks(),
        task_manager=TaskManager(),
        log_samples=True,
        device="cpu",
        batch_size=1,
        bootstrap_iters=0,
    )
    return {
        (task, sample["doc_id"], index): response[0]
        for task, samples in results["samples"].items()
        for sample in samples
        for index, response in enumerate(sample["resps"])
    }


def pair(response):
    """(likelihood, greedy): rolling likelihoods have no flag."""
    return response if isinstance(response, (tuple, list)) else (response, None)


ours = likelihoods(
    "local-completions",
    {
        "model": "demo",
        "base_url": f"{URL}/v1/completions",
        "tokenizer": MODEL,
        "tokenizer_backend": "huggingface",
        "num_concurrent": 1,
        "max_retries": 1,
        "max_length": 2048,
    },
)
theirs = likelihoods("hf", {"pretrained": MODEL, "dtype": "float32", "max_length": 2048})
assert ours.keys() == theirs.keys()
differences = {key: abs(float(pair(ours[key])[0]) - float(pair(theirs[key])[0])) for key in ours}
worst = max(differences, key=differences.get)
print(
    json.dumps(
        {
            "compared": len(ours),
            "largest_difference": differences[worst],
            "at": str(worst),
            "greedy_differs": sum(pair(ours[key])[1] != pair(theirs[key])[1] for key in ours),
        }
    )
)
