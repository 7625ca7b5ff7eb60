"""``iecl-fast export``."""

from iecl_fast.commands.words import Parser, check_torchvision, place

DESCRIPTION = """\
Write the encoder of a checkpoint, without projection head and SAIB, as a file for other libraries.
"""

EXAMPLES = """\
formats:
  torchvision   state_dict of a torchvision ResNet without its classifier, for torch.load
  detectron2    pickle for Detectron2's MODEL.WEIGHTS
  safetensors   the same names as torchvision, with the network's shape and the images' mean and deviation

examples:
  iecl-fast export runs/first --format safetensors                      runs/first/backbone.safetensors
  iecl-fast export runs/first --format detectron2 --output first.pkl
"""


def parser():
    command = Parser(prog="iecl-fast export", description=DESCRIPTION, epilog=EXAMPLES)
    command.add_argument("checkpoint", type=place, metavar="FILE|DIR", help="checkpoint or run folder")
    formats = ("torchvision", "detectron2", "safetensors")
    command.add_argument("--format", required=True, choices=formats, help="of the file")
    words = "a new file (default: backbone.* beside the checkpoint)"
    command.add_argument("--output", type=place, metavar="FILE", help=words)
    return command


def run(arguments):
    check_torchvision()
    from iecl_fast.evaluate.export import export_checkpoint

    path, backbone = export_checkpoint(arguments.checkpoint, arguments.format, arguments.output)
    print(f"{backbone.name}, width {backbone.width}, {backbone.stem} stem, after {backbone.step} steps: {path}")
    print("\n".join(_advice(arguments.format, backbone)))


def _advice(file_format, backbone):
    """How the other library takes the file, or that it does not."""
    original = backbone.width == 64 and backbone.stem == "imagenet"
    if file_format != "safetensors" and not original:
        library = {"torchvision": "torchvision", "detectron2": "Detectron2"}[file_format]
        yield f"{library}'s own {backbone.name} has width 64 and the imagenet stem: this file needs a network like it"
    elif file_format == "torchvision":
        yield f"model = torchvision.models.{backbone.name}(); model.fc = torch.nn.Identity()"
        yield "model.load_state_dict(torch.load(FILE))"
    elif file_format == "detectron2":
        from iecl_fast.ssl.encoders import BACKBONES

        depth, expansion = backbone.name.removeprefix("resnet"), BACKBONES[backbone.name][0].expansion
        yield f"MODEL.RESNETS: DEPTH {depth}, RES2_OUT_CHANNELS {64 * expansion}, STRIDE_IN_1X1 False"
        for key, values in (("PIXEL_MEAN", backbone.mean), ("PIXEL_STD", backbone.std)):
            yield f"MODEL.{key}: {[round(255 * value, 3) for value in values]}"
        yield "INPUT.FORMAT: RGB"
    yield "In Python: iecl_fast.evaluate.export.load_backbone(FILE)"
