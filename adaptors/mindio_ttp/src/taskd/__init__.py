"""
A replacement for MindCluster's `taskd` with only the functions that MindSpore's launcher `msrun`
uses.

msrun hands its processes to a package of this name when a feature of fault tolerance is switched on
(`MS_ENABLE_TFT`). With this package tft decides when the processes are started and ended. The
package cannot be used next to the real one: where another distribution installs a package `taskd`,
this one cannot be imported, and msrun manages its processes itself.
"""

from mindio_ttp.package_conflicts import refuse_another

refuse_another("taskd")
