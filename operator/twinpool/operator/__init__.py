"""The operator: turns an ``InferencePool`` into running groups of pods, a router in front of them, and a status.

``logic`` decides (pure functions over what was observed), ``shell`` watches and writes.
"""
