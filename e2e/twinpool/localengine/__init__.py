"""The real engine on this machine: vLLM for CPUs, NIXL and two small models, installed once into the cache.

For tests and the demo. Run ``python -m twinpool.localengine install``, then use :func:`engine_image`.
"""

from twinpool.localengine.image import engine_image

__all__ = ["engine_image"]
