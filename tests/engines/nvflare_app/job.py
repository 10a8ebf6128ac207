"""The NVFlare job in its simulator: python job.py WORKSPACE NOISE FULL|DIFF"""

import sys
from pathlib import Path

from net import Net
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.client.config import TransferType
from nvflare.recipe import SimEnv

from situs.engines.nvflare import GuardFilter

HERE = Path(__file__).parent
RATE, SHAPE = 0.05, {"img_size": 28, "in_chans": 1}

if __name__ == "__main__":
    workspace, noise, kind = sys.argv[1], float(sys.argv[2]), sys.argv[3]
    stated = f"fedavg=1:{RATE}" + f"+noise={noise / RATE:g}" * (noise > 0)
    recipe = FedAvgRecipe(
        name="guarded",
        model=Net(),
        min_clients=2,
        num_rounds=2,
        train_script=str(HERE / "client.py"),
        train_args=f"--noise {noise}",
        params_transfer_type=TransferType[kind],
    )
    recipe.add_client_file(str(HERE / "net.py"))
    guard = GuardFilter("net:Net", attacks=["patchembed"], defence=stated, options=SHAPE)
    recipe.add_client_output_filter(guard, tasks=["train"])
    run = recipe.execute(SimEnv(num_clients=2, workspace_root=workspace))
    print("status", run.get_status())
