/* A video decoder library that decodes nothing: GStreamer's nvcodec plugin offers cudaupload and cudadownload only where it
 * finds one. Every entry says that it is not supported. */
#define STUB(name)                                                                                                     \
    int name(void);                                                                                                    \
    int name(void) { return 801; }
STUB(cuvidCtxLockCreate)
STUB(cuvidCtxLockDestroy)
STUB(cuvidCtxLock)
STUB(cuvidCtxUnlock)
STUB(cuvidCreateDecoder)
STUB(cuvidReconfigureDecoder)
STUB(cuvidDestroyDecoder)
STUB(cuvidDecodePicture)
STUB(cuvidCreateVideoParser)
STUB(cuvidParseVideoData)
STUB(cuvidDestroyVideoParser)
STUB(cuvidMapVideoFrame)
STUB(cuvidMapVideoFrame64)
STUB(cuvidUnmapVideoFrame)
STUB(cuvidUnmapVideoFrame64)
STUB(cuvidGetDecoderCaps)
