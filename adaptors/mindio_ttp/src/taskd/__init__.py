"""
A replacement for MindCluster's `taskd` with only the functions that MindSpore's launcher `msrun`
uses.

If a feature of fault tolerance is switched on (`MS_ENABLE_TFT`), msrun lets a package of this name
manage its processes. With this package, tft decides when the processes are started and ended. The
package cannot be used together with MindCluster's package: if another distribution installs a
package `taskd`, this package cannot be imported, and msrun manages its processes itself.
"""

from mindio_ttp.package_conflicts import refuse_another

refuse_another("taskd")
