"""Where files of users import these from; each has a file of its own in `methods/`."""

from openrlhf_ext.algorithms.methods.dapo import Dapo, DapoOptions
from openrlhf_ext.algorithms.methods.dr_grpo import DrGrpo, DrGrpoOptions
from openrlhf_ext.algorithms.methods.grpo import Grpo, GrpoOptions
from openrlhf_ext.algorithms.methods.gspo import Gspo, GspoOptions

__all__ = ["Dapo", "DapoOptions", "DrGrpo", "DrGrpoOptions", "Grpo", "GrpoOptions", "Gspo", "GspoOptions"]
