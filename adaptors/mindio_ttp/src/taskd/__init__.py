"""
A replacement for the package `taskd` of MindCluster. This package has only the functions that
MindSpore's launcher `msrun` uses.

If the environment variable `MS_ENABLE_TFT` switches a feature of fault tolerance on, msrun lets a
package with the name `taskd` manage its processes. With this package, tft decides when the
processes are started and ended. If MindCluster's own package `taskd` is installed too, this package
cannot be imported. msrun then manages its processes itself.
"""

from mindio_ttp.package_conflicts import refuse_another

refuse_another("taskd")
