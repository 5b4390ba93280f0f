// What clang's -Wthread-safety knows of locks (lint); empty for other compilers.
#pragma once

#if defined(__clang__)
#define SR_ANNOTATION(x) __attribute__((x))
#else
#define SR_ANNOTATION(x)
#endif
#define SR_CAPABILITY(x) SR_ANNOTATION(capability(x))
#define SR_SCOPED_CAPABILITY SR_ANNOTATION(scoped_lockable)
#define SR_GUARDED_BY(x) SR_ANNOTATION(guarded_by(x))  // a member: read and written under the lock
#define SR_REQUIRES(...) SR_ANNOTATION(requires_capability(__VA_ARGS__))
#define SR_ACQUIRE(...) SR_ANNOTATION(acquire_capability(__VA_ARGS__))
#define SR_ACQUIRE_SHARED(...) SR_ANNOTATION(acquire_shared_capability(__VA_ARGS__))
#define SR_RELEASE(...) SR_ANNOTATION(release_capability(__VA_ARGS__))
#define SR_RELEASE_SHARED(...) SR_ANNOTATION(release_shared_capability(__VA_ARGS__))
#define SR_ASSERT(...) SR_ANNOTATION(assert_capability(__VA_ARGS__))
#define SR_TRY_ACQUIRE(...) SR_ANNOTATION(try_acquire_capability(__VA_ARGS__))
