"""A memory in the trainers people use: one file each, which needs the library of its name.

``sgp.integrations.transformers``, ``sgp.integrations.lightning`` and ``sgp.integrations.stable_baselines3`` have a
``GradientMemoryCallback``, ``sgp.integrations.peft`` has ``next_adapter``. Accelerate needs none:
``memory.attach(optimizer)`` is all.
"""
