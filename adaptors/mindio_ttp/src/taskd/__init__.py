"""
In the place of MindCluster's `taskd`: what MindSpore's launcher `msrun` uses of it, and nothing else.

msrun hands its processes to a package of this name when a feature of fault tolerance is switched on
(`MS_ENABLE_TFT`). This one has tft say when they are started and ended. It does not stand beside the
real one: where another distribution brings a package `taskd`, this one cannot be imported, and msrun
looks after its processes itself.
"""

from mindio_ttp.neighbours import refuse_another

refuse_another("taskd")
