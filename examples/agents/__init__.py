"""Environments in which a model acts, run against the service, and what a trainer needs of it: ids, logprobs, versions.

python -m examples.agents.with_openai_agents URL     pip install openai-agents
python -m examples.agents.with_verifiers URL         pip install "verifiers<0.2"

Each in an environment of its own; neither needs this project installed.
"""
