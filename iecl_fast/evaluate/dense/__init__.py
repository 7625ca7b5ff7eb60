"""What a backbone is worth where every place of an image counts: object detection and semantic segmentation.

``iecl-fast evaluate detect|segment`` puts the backbone of a checkpoint into torchvision's Faster, Mask or Keypoint
R-CNN or into its DeepLab-v3, trains that on annotated images and measures it: mean average precision, mean IoU.
"""
